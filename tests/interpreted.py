"""Which tests run under Triton's interpreter: by the name of their file, by a mark, or by a fixture they take.

Owns the rule and the list of files that follows from it, so that nobody has to remember to add a file to a list.
"""

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
TESTS = Path(__file__).parent
# Every test of a file of such a name needs the interpreter; the last two drive it, or the compiler, from outside.
INTERPRETED_NAMES = ("test_*triton*.py", "test_interpreter_*.py")
DRIVERS = {"test_triton_interpreter.py", "test_triton_compile.py"}
# Tests that take one of these fixtures run on every backend: in the ordinary process, and interpreted on Triton's.
BACKEND_FIXTURES = {"backend", "every_backend"}
MARK = "interpreter"  # of a test, or of one parameter, that needs the interpreter in a file of another name
SIGNS_IN_TEXT = re.compile(rf"\bmark\.{MARK}\b|\bevery_backend\b|\bbackend: AttentionBackend\b")


def has_interpreted_name(path: Path) -> bool:
    return path.name not in DRIVERS and any(fnmatch.fnmatch(path.name, pattern) for pattern in INTERPRETED_NAMES)


def is_interpreted_only(item: pytest.Item) -> bool:
    return has_interpreted_name(item.path) or item.get_closest_marker(MARK) is not None


def is_interpreted_too(item: pytest.Item) -> bool:
    return bool(BACKEND_FIXTURES & set(getattr(item, "fixturenames", ())))


def interpreted_files() -> list[Path]:
    """Every file that has tests for the interpreter."""
    return sorted(
        path
        for path in TESTS.rglob("test_*.py")
        if path.name not in DRIVERS and (has_interpreted_name(path) or SIGNS_IN_TEXT.search(path.read_text()))
    )


def run_interpreted(
    arguments: list[str], *, root: Path = TESTS.parent, timeout: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest with these arguments on a tree, with Triton's interpreter on, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", *arguments],
        cwd=root,
        # The interpreter's arrays are too small to share among threads.
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
