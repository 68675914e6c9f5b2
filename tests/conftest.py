"""The real models, for every test that asks for one."""

from pathlib import Path

import pytest

from tests import model_files


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return model_files.smollm2_path()


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return model_files.gemma3_path()
