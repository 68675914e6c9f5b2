"""Plants faults in the kernels, one at a time, and runs the tests that should notice.

Each is planted in a copy of the tree, and the tests run in a process of their own, since a broken kernel may crash. A
fault that no longer fits the source is itself a failure. The faults are in mutations.py.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.interpreted import TESTS, run_interpreted
from tests.kernels.mutations import Mutation

ROOT = TESTS.parent
COPIED_FOLDERS = ("kernels", "models", "paged_cache", "scheduler", "tests")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "data", "end_to_end", "server", "benchmarks")
TIMEOUT_SECONDS = 600
ALL_PASSED, SOME_FAILED = 0, 1  # pytest's exit codes; other positive ones mean that the tests did not run


class MutationError(Exception):
    """The fault was not planted, or the tests could not run: it says nothing about the tests."""


def run_tests(mutation: Mutation | None, tests: Iterable[str], environment: Mapping[str, str]) -> bool:
    """Whether tests pass on a copy of the tree with the fault planted, or on an untouched copy.

    Raises:
        MutationError: the fault does not fit the source, or pytest could not run the tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED_FOLDERS:
            shutil.copytree(ROOT / name, root / name, ignore=NOT_COPIED)
        shutil.copy(ROOT / "pyproject.toml", root)
        if mutation is not None:
            plant(mutation, root / mutation.file)
        try:
            result = run_interpreted(["-x", *tests], root=root, timeout=TIMEOUT_SECONDS, **environment)
        except subprocess.TimeoutExpired as error:
            # Not one of the faults makes an endless loop: the machine is busy, which says nothing about the tests.
            raise MutationError(f"tests did not end in {TIMEOUT_SECONDS} s: {' '.join(tests)}") from error
    if result.returncode > SOME_FAILED:
        raise MutationError(f"pytest ended with {result.returncode}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.returncode == ALL_PASSED  # a crash is negative


def is_caught(mutation: Mutation, environment: Mapping[str, str]) -> bool:
    """Whether the tests notice the fault; the environment is added to that of the process that runs them."""
    return not run_tests(mutation, mutation.tests, environment)


def plant(mutation: Mutation, path: Path) -> None:
    """Replace the one occurrence, or raise MutationError."""
    source = path.read_text()
    if source.count(mutation.old) != 1:
        raise MutationError(f"{mutation.name}: {mutation.file} has {source.count(mutation.old)} of {mutation.old!r}")
    path.write_text(source.replace(mutation.old, mutation.new))
