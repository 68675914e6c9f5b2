"""Real models for the tests (a path from the environment, or what the model store has or downloads), and threads."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from server import model_store


def _real_model(variable: str, name: str) -> Path:
    return Path(os.environ[variable]) if variable in os.environ else model_store.resolve(name)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return _real_model("OCTAVO_TEST_SMOLLM2", "smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return _real_model("OCTAVO_TEST_GEMMA3", "gemma3-270m")


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny, and on busy cores a second thread mostly waits for the first."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
