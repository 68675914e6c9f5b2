"""Runs the shared tests on the Triton backends under Triton's interpreter, in a process of its own.

The interpreter must be on before Triton is imported, leaves its names in the kernels' module, and turns an access
out of bounds into a crash.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import IS_INTERPRETING

pytest.importorskip("triton")


@pytest.mark.skipif(IS_INTERPRETING, reason="this is the child process")
@pytest.mark.parametrize("file", ["test_attention.py", "test_block_writes.py", "test_explainers.py"])
def test_triton_under_the_interpreter(file: str) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    result = subprocess.run(
        [*command, str(here / file)],
        cwd=here.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
