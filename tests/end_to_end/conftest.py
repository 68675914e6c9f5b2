"""A server on the default model with the default settings, shared by the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server_process import ServerProcess


@pytest.fixture(scope="package")
def smollm2(smollm2_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(smollm2_path, "--served-model-name", "smollm2") as server:
        yield server
