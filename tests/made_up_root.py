"""File systems made up for tests of what reads the kernel's files."""

from collections.abc import Mapping
from pathlib import Path


def root_with(root: Path, files: Mapping[str, str]) -> Path:
    """Write each file of that name under `root`, and return it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root
