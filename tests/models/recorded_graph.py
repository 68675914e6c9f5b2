"""A CUDA graph on CPU tensors: records every torch operation and every Triton launch, and replays exactly those.

As on a device, a replay takes nothing from the host but what the recording took, writes the very tensors that the
recording made, and finds nothing in them: each holds poison until the replay writes it. What a capture forbids raises.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

POISONED_INTEGER = 1 << 30
ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
# Calls that read the tensor on the host, and do not all reach the dispatcher on a CPU.
WAITING_METHODS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
}


class CaptureError(RuntimeError):
    """The work did what no capture allows."""


def poison(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(min(POISONED_INTEGER, torch.iinfo(tensor.dtype).max))


class RecordedCpuGraph:
    """What was done, in order, and the tensors that it made."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.made: list[torch.Tensor] = []
        self.is_listening = True  # off in a step that is recorded as a whole

    @torch.inference_mode()
    def replay(self) -> None:
        for tensor in self.made:
            poison(tensor)
        for step in self.steps:
            step()

    @contextmanager
    def deaf(self) -> Iterator[None]:
        self.is_listening = False
        try:
            yield
        finally:
            self.is_listening = True


class CpuGraphRecorder:
    """In place of `models.graph_recorder.CudaGraphRecorder`."""

    def __init__(self) -> None:
        self._recording: RecordedCpuGraph | None = None

    def record(self, work: Callable[[], None]) -> RecordedCpuGraph:
        work()
        graph = self._recording = RecordedCpuGraph()
        try:
            with _recorded_launches(graph), _RefuseWaiting(graph), _RecordOperations(graph):
                work()
        finally:
            self._recording = None
        return graph

    def opaque(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The new tensor that `call` returns; recorded as one operation, for what works behind torch's back."""
        graph = self._recording
        if graph is None:
            return call()
        with graph.deaf():
            result = call()
        graph.made.append(result)
        graph.steps.append(lambda: result.copy_(call()))
        return result


class _RecordOperations(TorchDispatchMode):
    def __init__(self, graph: RecordedCpuGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._graph.is_listening:
            return func(*args, **kwargs)
        _refuse_waiting(func, args)
        result = func(*args, **kwargs)
        inputs = {_address(x) for x in _tensors((args, kwargs))}
        outputs = _tensors(result)
        made = [x for x in outputs if _address(x) not in inputs]
        self._graph.made += made
        # A view has nothing to do at a replay, and an allocation leaves what is there.
        if func.overloadpacket.__name__ not in ALLOCATIONS and (made or func._schema.is_mutable):
            self._graph.steps.append(lambda: _repeat(func, args, kwargs, outputs))
        return result


class _RefuseWaiting(TorchFunctionMode):
    def __init__(self, graph: RecordedCpuGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._graph.is_listening and func in WAITING_METHODS:
            raise CaptureError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def _recorded_launches(graph: RecordedCpuGraph) -> Iterator[None]:
    """Record the launches of Triton's interpreter, where there is one."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        yield
        return
    run = InterpretedFunction.run

    def record(kernel: Any, *args: Any, **options: Any) -> None:
        with graph.deaf():  # the interpreter's own use of torch is no part of the kernel
            run(kernel, *args, **options)
        graph.steps.append(lambda: run(kernel, *args, **options))

    InterpretedFunction.run = record
    try:
        yield
    finally:
        InterpretedFunction.run = run


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> None:
    """Do it again, and put the results where the first ones are."""
    for output, result in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
        if _address(output) != _address(result):
            output.copy_(result)


def _refuse_waiting(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse what needs a value or a shape that only the device knows."""
    if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):
        depends_on_data = any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1]))
    else:
        depends_on_data = torch.Tag.dynamic_output_shape in func.tags
    if depends_on_data or torch.Tag.data_dependent_output in func.tags:
        raise CaptureError(f"{func} waits for the device")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
