"""The real models, for every test that asks for one, and an oracle of one; Triton's interpreter, where it is needed.

The interpreter must be on before Triton is imported, so its tests run in child processes: see
tests/kernels/test_triton_interpreter.py.
"""

from pathlib import Path
from typing import Any

import pytest

from tests import model_files
from tests.interpreted import IS_INTERPRETING, is_interpreted_only, is_interpreted_too

if IS_INTERPRETING:
    from tests.kernels import interpreter_repair

    interpreter_repair.install()


@pytest.fixture
def native_library() -> None:
    """Skips where there is no compiler, fails where there is one and no library."""
    from tests.kernels.conftest import make_backend  # imports torch, which tests of the scheduler do without

    make_backend("cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each process keeps the tests that can run in it."""
    if IS_INTERPRETING:
        kept = [item for item in items if is_interpreted_only(item) or is_interpreted_too(item)]
    else:
        kept = [item for item in items if not is_interpreted_only(item)]
    dropped = [item for item in items if item not in set(kept)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return model_files.smollm2_path()


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> Any:  # a torch.nn.Module
    from tests.models.real_models import smollm2_oracle  # imports transformers, which few tests need

    return smollm2_oracle(smollm2_path)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return model_files.gemma3_path()
