"""The backend fixtures: a test that takes one runs on each attention backend that this process can run.

Triton's interpreter must be on before Triton is imported, so its backends run in child processes
(test_triton_interpreter.py), which run these same files with TRITON_INTERPRET=1, the interpreter repaired.
"""

import shutil
from collections.abc import Iterator

import pytest
import torch

from kernels.attention.backend import AttentionBackend, BackendUnavailableError, select_backend
from tests.interpreted import IS_INTERPRETING

BACKENDS = ("triton", "triton-split") if IS_INTERPRETING else ("torch", "cpu")
BACKENDS_AND_REFERENCE = BACKENDS if IS_INTERPRETING else ("reference", *BACKENDS)


def make_backend(name: str) -> AttentionBackend:
    """The backend of that name; "triton-split" cuts every key range into single tiles."""
    if name == "triton-split":
        from kernels.attention.triton_backend import TritonBackend

        return TritonBackend(target_programs=1 << 20, min_split_keys=1)
    try:
        return select_backend(name, torch.device("cpu"))
    except BackendUnavailableError as error:
        if shutil.which("c++") is None:
            pytest.skip(str(error))
        raise


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """For tests that change torch's number of threads."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Each attention backend in turn, to be compared with the reference."""
    return make_backend(request.param)


@pytest.fixture(params=BACKENDS_AND_REFERENCE)
def every_backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Each attention backend in turn, the reference too, to be compared with something else."""
    return make_backend(request.param)
