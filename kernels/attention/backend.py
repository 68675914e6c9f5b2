"""The attention protocol and the one place that chooses an implementation.

Knows the names of the backends; must not know models or the cache manager. Backends are imported only when
chosen, so that an absent optional dependency costs nothing.
"""

import importlib.util
import logging
from typing import Protocol

import torch

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer, Rotation

BACKEND_NAMES = ("auto", "triton", "cpu", "torch", "reference")
PROGRAMS_PER_MULTIPROCESSOR = 2  # what registers and shared memory let run at once
INTERPRETER_PROGRAMS = 8  # Triton's interpreter runs one program after another: splitting more only costs

logger = logging.getLogger(__name__)


class BackendUnavailableError(RuntimeError):
    """The attention backend asked for does not exist, or cannot run on this machine. The text is for a person."""


class AttentionBackend(Protocol):
    """Writes keys and values into blocks and attends over them. Stateless between calls."""

    name: str

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> None:
        """Scatter this step's keys and values to `metadata.slot_mapping`; slot -1 writes nothing."""
        ...

    def rotate_and_write(
        self,
        heads: torch.Tensor,  # [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], queries, keys, values
        rotation: Rotation,
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim]
        """Norm and rotate query and key heads, write keys and values to the cache, and return the queries."""
        ...

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim], dtype of query
        """Causal attention of every query token over its own sequence's blocks."""
        ...


def select_backend(name: str, device: torch.device, *, batch_invariant: bool = False) -> AttentionBackend:
    """Choose the attention backend, once at start.

    Args:
        name: one of `BACKEND_NAMES`. "auto" is Triton on a GPU, the native library on a CPU, and plain torch
            (with a warning) on a CPU where the library is not built.
        device: where the KV cache lives.
        batch_invariant: a token's attention is bitwise the same alone, in a batch, chunked or split. The native CPU
            kernels always keep that; plain torch never does.

    Raises:
        BackendUnavailableError: unknown name, or that backend cannot run here; says what to do.
    """
    if name not in BACKEND_NAMES:
        raise BackendUnavailableError(f"unknown attention backend {name!r}: choose one of {', '.join(BACKEND_NAMES)}")
    if batch_invariant and name in ("torch", "reference"):
        raise BackendUnavailableError(
            f"the {name} attention backend is not batch-invariant: use triton on a GPU or cpu on a CPU"
        )
    if name == "reference":
        from kernels.attention.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "torch":
        return _torch_backend()
    if name == "triton" or (name == "auto" and device.type != "cpu"):
        return _triton_backend(device, batch_invariant)
    if name == "cpu":
        return _cpu_backend(device)
    try:
        return _cpu_backend(device)
    except BackendUnavailableError as error:
        if batch_invariant:
            raise
        logger.warning(
            "The model runs on plain torch, with weights as they are, which is several times slower: %s", error
        )
        return _torch_backend()


def _torch_backend() -> AttentionBackend:
    from kernels.attention.torch_gather import TorchBackend

    return TorchBackend()


def _cpu_backend(device: torch.device) -> AttentionBackend:
    from kernels.attention.cpu import CpuBackend
    from kernels.cpu.native_library import NativeLibraryError

    if device.type != "cpu":
        raise BackendUnavailableError(f"the cpu attention backend cannot read a KV cache on {device}")
    try:
        return CpuBackend()
    except NativeLibraryError as error:
        raise BackendUnavailableError(
            f"{error}. Install a C++ compiler (g++) and reinstall octavo to have the native CPU kernels"
        ) from error


def _triton_backend(device: torch.device, batch_invariant: bool) -> AttentionBackend:
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailableError("the triton attention backend needs the package triton: install octavo[gpu]")
    import triton

    from kernels.attention.triton_backend import TritonBackend

    if device.type == "cuda":
        num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        return TritonBackend(num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR, batch_invariant=batch_invariant)
    if not triton.knobs.runtime.interpret:
        raise BackendUnavailableError(
            f"the triton attention backend needs a GPU, not {device} (or TRITON_INTERPRET=1, for tests)"
        )
    return TritonBackend(INTERPRETER_PROGRAMS, batch_invariant=batch_invariant)
