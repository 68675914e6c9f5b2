"""A pytest plugin for the interpreter's process: how many passed tests launched each kernel.

Writes {kernel: number of tests} as JSON to the file that KERNEL_LAUNCHES names.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.interpreter import GridExecutor

VARIABLE = "KERNEL_LAUNCHES"
NUM_PASSED = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NUM_PASSED] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the kernels that a test launches, and count them if it passes."""
    launched = set()
    run = GridExecutor.__call__

    def run_and_note(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launched.add(self.fn.__name__)
        run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", run_and_note)
        yield
    item.config.stash[NUM_PASSED].update(launched)


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(os.environ[VARIABLE]).write_text(json.dumps(session.config.stash[NUM_PASSED]))
