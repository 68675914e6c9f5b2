"""Runs every part of the check of a card, and the tuner, as dry runs in this one process: python -m ... FOLDER.

Triton's interpreter must be on before Triton is imported, so the tests start it as a child process.
"""

import sys
from pathlib import Path

from benchmarks import (
    gpu_attention,
    gpu_checks,
    gpu_engine,
    gpu_kernel_tests,
    gpu_operations,
    gpu_transformers,
    tune_kernels,
)

PARTS = (gpu_checks, gpu_kernel_tests, gpu_attention, gpu_engine, gpu_operations, gpu_transformers)


def main(folder: Path) -> int:
    statuses = [part.main(["--dry-run", "--results", str(folder / "gpu.json")]) for part in PARTS]
    return max(*statuses, tune_kernels.main(["--dry-run", "--output", str(folder / "tiles.json")]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
