"""Runs every test of the Triton kernels under Triton's interpreter, a child process for each file.

The interpreter must be on before Triton is imported, leaves its names in the kernels' module, and turns an access
out of bounds into a crash.
"""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.interpreted import IS_INTERPRETING, TESTS, interpreted_files, run_interpreted

pytest.importorskip("triton", reason="Triton has no build for this platform")
pytestmark = pytest.mark.skipif(IS_INTERPRETING, reason="this is the child process")

FILES = interpreted_files()

Children = dict[Path, Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def children(request: pytest.FixtureRequest) -> Iterator[Children]:
    """The children of the selected tests, as many at once as there are cores: each keeps to one thread."""
    selected = [item.callspec.params.get("path") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {path: pool.submit(run_interpreted, [str(path)]) for path in FILES if path in selected}
        pool.shutdown(cancel_futures=True)


def test_the_files_are_found() -> None:
    names = {path.name for path in FILES}
    assert {"test_attention.py", "test_block_writes.py", "test_explainers.py", "test_interpreter_repair.py"} <= names
    assert {"test_toy_triton.py", "test_triton_write.py"} <= names


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(TESTS).as_posix() for path in FILES])
def test_under_the_interpreter(path: Path, children: Children) -> None:
    """A child that finds no test to run fails too."""
    result = children[path].result()
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
