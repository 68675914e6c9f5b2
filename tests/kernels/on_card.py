"""A pytest plugin that runs the interpreter's tests on a card, compiled: python -m pytest -p tests.kernels.on_card ...

The tests make CPU tensors and stay as they are: each launch gets copies of its tensors on the card, and what the kernel
changed is copied back. Without a card, and with TRITON_INTERPRET=1, the copies are on the CPU: a test of the plugin.
benchmarks/gpu_kernel_tests.py runs it. Knows launches, not kernels.
"""

import os
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from kernels.attention import backend
from tests import interpreted
from tests.kernels import interpreter_repair

CARD = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_COMPILED = os.environ.get("TRITON_INTERPRET") != "1"
# What a test means by interpreting is that it runs on Triton's backends. Set as this module is imported: conftest.py,
# which chooses the backends by it, is imported before pytest configures its plugins.
interpreted.IS_INTERPRETING = True
NOT_OF_KERNELS = {"test_interpreter_repair.py"}


class CopiedTensors:
    """The copies of one launch: with their strides, and sharing memory where the originals do."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}  # of each storage on the host, by its address
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # original and copy

    def to_card(self, value: Any) -> Any:
        """A tensor of the CPU as one of the card; anything else as it is."""
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        memory = self._memory.get(storage.data_ptr())
        if memory is None:
            # Uninitialised: between the blocks of a widely spread cache may lie gigabytes that nobody touches.
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=CARD)
            self._memory[storage.data_ptr()] = memory
        copy = torch.empty(0, dtype=value.dtype, device=CARD)
        copy.set_(memory.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        _once(copy).copy_(_once(value))
        self._pairs.append((value, copy))
        return copy

    def copy_back(self) -> None:
        """Bring back what the launch left. Waits for it."""
        for original, copy in self._pairs:
            _once(original).copy_(_once(copy))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Without repetitions of the same elements, which cannot be copied to."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def on_card(kernel_class: type) -> None:
    """Let every launch of such kernels run on copies."""
    launch = kernel_class.run

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        copies = CopiedTensors()
        moved = {name: copies.to_card(value) for name, value in options.items()}
        result = launch(kernel, *map(copies.to_card, args), **moved)
        copies.copy_back()
        return result

    kernel_class.run = run


def triton_backend(_device: torch.device, batch_invariant: bool) -> backend.AttentionBackend:
    """The backend that the interpreter's tests would get: the same plans as there."""
    from kernels.attention.triton_backend import TritonBackend

    return TritonBackend(backend.INTERPRETER_PROGRAMS, batch_invariant=batch_invariant)


def pytest_configure(config: pytest.Config) -> None:
    if IS_COMPILED and CARD.type == "cpu":
        raise pytest.UsageError("torch sees no CUDA device; with TRITON_INTERPRET=1 the plugin itself is tested")
    if not IS_COMPILED:
        interpreter_repair.install()
    on_card(JITFunction if IS_COMPILED else InterpretedFunction)
    backend._triton_backend = triton_backend


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [
        item
        for item in items
        if item.path.name not in NOT_OF_KERNELS
        and (interpreted.is_interpreted_only(item) or interpreted.is_interpreted_too(item))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
    items[:] = wanted
