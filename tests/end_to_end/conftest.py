"""A server on the default model with the default settings, and its oracle, shared by the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.end_to_end.server_process import ServerProcess
from tests.models.real_models import smollm2_oracle


@pytest.fixture(scope="package")
def smollm2(smollm2_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(smollm2_path, "--served-model-name", "smollm2") as server:
        yield server


@pytest.fixture(scope="package")
def smollm2_reference(smollm2_path: Path) -> torch.nn.Module:
    return smollm2_oracle(smollm2_path)
