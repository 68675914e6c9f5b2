"""The package's name is taken by another distribution that transformers looks for: both must get along."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels


def test_version() -> None:
    assert all(part.isdigit() for part in kernels.__version__.split("."))


def test_transformers_imports_beside_us() -> None:
    pytest.importorskip("transformers", reason="only with it installed is there a name to clash with")
    program = "import kernels, transformers; print(kernels.__file__); transformers.AutoConfig"
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, env={**os.environ}, check=True
    )
    assert Path(result.stdout.strip()).name == "__init__.py"
