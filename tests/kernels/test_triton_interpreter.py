"""Runs every test of the Triton kernels under Triton's interpreter, a child process for each file.

The interpreter must be on before Triton is imported, leaves its names in the kernels' module, and turns an access
out of bounds into a crash.
"""

from pathlib import Path

import pytest

from tests.interpreted import IS_INTERPRETING, TESTS, interpreted_files, run_interpreted

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(IS_INTERPRETING, reason="this is the child process")

FILES = interpreted_files()


def test_the_files_are_found() -> None:
    names = {path.name for path in FILES}
    assert {"test_attention.py", "test_block_writes.py", "test_explainers.py", "test_interpreter_repair.py"} <= names


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(TESTS).as_posix() for path in FILES])
def test_under_the_interpreter(path: Path) -> None:
    """A child that finds no test to run fails too."""
    result = run_interpreted([str(path)])
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
