"""The build of the native library: where the file goes, what it may link, and that it is optional."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = Path("kernels/cpu/_paged_attention.so")


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the package's own build of the library into `folder`."""
    pytest.importorskip("setuptools", reason="an environment need not hold what built the package")
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder / "tmp")]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_build(tmp_path: Path) -> None:
    result = build(tmp_path)
    assert result.returncode == 0, result.stderr
    library = (tmp_path / LIBRARY).read_bytes()
    assert b"octavo_attend" in library
    assert b"GOMP_parallel" in library  # uses OpenMP
    assert b"libgomp.so" not in library  # but names no runtime to load


def test_build_without_a_compiler_succeeds(tmp_path: Path) -> None:
    result = build(tmp_path, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / LIBRARY).exists()
