"""The tensors of the paged KV cache, on the device and the host. The only file of this package that imports torch."""

import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention.metadata import KVLayer
from paged_cache.host_memory import populate, zeroed
from paged_cache.spec import KVCacheSpec

MAX_COPY_BYTES = 64 << 20  # of a copy's temporary: what activations leave of a GPU's memory is not to be counted on


class KVCache:
    """One `KVLayer` per model layer, and room on the host to swap blocks to; allocated at start-up, never resized."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device, num_host_blocks: int = 0) -> None:
        """Allocate zeroed blocks: `num_blocks * spec.bytes_per_block` bytes on `device`, and so for the host's.

        Raises:
            MemoryError: if the host's blocks cannot be pinned, so that a GPU could not copy them beside its work.
        """
        self.spec = spec
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
        # One block's keys and values lie side by side, the unit that copies and transfers move.
        self._memory: list[mmap.mmap] = []  # behind the tensors, where that is main memory
        self._data = self._zeros(shape, getattr(torch, spec.dtype), device)
        self._scales: torch.Tensor | None = None  # [num_layers, num_blocks, 2, num_kv_heads, block_size] float32
        if spec.is_quantised:
            self._scales = self._zeros(shape[:-1], torch.float32, device)
        self.layers = [self._layer(index) for index in range(spec.num_layers)]
        # All that moves: one tensor, or two where there are scales.
        self._words = [_as_words(data) for data in (self._data, self._scales) if data is not None]
        # On the host all layers of a block lie side by side: [num_host_blocks, num_layers, words], as in _words.
        self._host_words = [_host_blocks(words, num_host_blocks) for words in self._words] if num_host_blocks else []

    def _layer(self, index: int) -> KVLayer:
        key, value = self._data[index].unbind(dim=1)
        if self._scales is None:
            return KVLayer(key, value)
        return KVLayer(key, value, *self._scales[index].unbind(dim=1))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros. Those in main memory have no pages yet: 4 GiB of them would take a start longer than all else."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or not num_bytes:
            return torch.zeros(shape, dtype=dtype, device=device)
        self._memory.append(zeroed(num_bytes))
        return torch.frombuffer(self._memory[-1], dtype=dtype).view(shape)

    def populate(self, is_busy: Callable[[], bool]) -> list[threading.Thread]:
        """Have blocks in main memory backed by pages while it is not busy, in threads that nothing need wait for."""
        threads = [
            threading.Thread(target=populate, args=(memory, is_busy), name="kv-cache-pages", daemon=True)
            for memory in self._memory
        ]
        for thread in threads:
            thread.start()
        return threads

    def copy_blocks(self, block_copies: torch.Tensor) -> None:
        """Copy whole blocks in every layer (copy-on-write), as if all were read before any is written.

        A block may be the source of one pair and the destination of another: its last other reader was preempted
        in this step, and it was handed out again.

        Args:
            block_copies: [num_copies, 2] int64, source and destination block ids; no destination stands twice.
        """
        src, dst = block_copies.unbind(dim=1)
        num_bytes = len(src) * self.spec.bytes_per_block // self.spec.num_layers
        num_layers = max(1, MAX_COPY_BYTES // max(1, num_bytes))  # at once
        for words in self._words:
            for first in range(0, self.spec.num_layers, num_layers):
                layers = words[first : first + num_layers]
                layers.index_copy_(1, dst, layers.index_select(1, src))

    def swap_out(self, moves: npt.NDArray[np.int64]) -> None:
        """Copy whole blocks, all layers of them, to the host. A GPU does it in the order of its stream, unwaited for.

        Args:
            moves: [num_moves, 2] int64, block ids of the device and of the host.
        """
        for device_ids, host_ids in self._chunks(moves[:, 0], moves[:, 1]):
            for words, host_words in zip(self._words, self._host_words, strict=True):
                gathered = words.transpose(0, 1).index_select(0, device_ids)  # contiguous, as on the host
                for place, first, num in _runs(host_ids):
                    host_words[first : first + num].copy_(gathered[place : place + num], non_blocking=True)

    def swap_in(self, moves: npt.NDArray[np.int64]) -> None:
        """Copy whole blocks back from the host, as `swap_out` does.

        Args:
            moves: [num_moves, 2] int64, block ids of the host and of the device.
        """
        for device_ids, host_ids in self._chunks(moves[:, 1], moves[:, 0]):
            for words, host_words in zip(self._words, self._host_words, strict=True):
                gathered = words.new_empty((len(host_ids), *host_words.shape[1:]))
                for place, first, num in _runs(host_ids):
                    gathered[place : place + num].copy_(host_words[first : first + num], non_blocking=True)
                words.transpose(0, 1).index_copy_(0, device_ids, gathered)

    def _chunks(
        self, device_ids: npt.NDArray[np.int64], host_ids: npt.NDArray[np.int64]
    ) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """As many moves at once as the memory for a copy allows: the device's ids on the device, the host's as numbers.

        Args:
            device_ids: [num_moves].
            host_ids: [num_moves].
        """
        ids = torch.from_numpy(device_ids.copy())
        if self._data.is_cuda:  # from pinned memory, or the host would wait for the device
            ids = ids.pin_memory().to(self._data.device, non_blocking=True)
        num_moves = max(1, MAX_COPY_BYTES // self.spec.bytes_per_block)
        for first in range(0, len(host_ids), num_moves):
            yield ids[first : first + num_moves], host_ids[first : first + num_moves].tolist()


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches of ids that follow one another: the place of the first, the first, and how many."""
    place = 0
    for end in range(1, len(block_ids) + 1):
        if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
            yield place, block_ids[place], end - place
            place = end


def _host_blocks(words: torch.Tensor, num_host_blocks: int) -> torch.Tensor:  # [num_host_blocks, num_layers, words]
    """Zeroed host memory for blocks; pinned where a GPU copies them, or each copy would wait for all work before it.

    Registered by hand: torch's own allocator of pinned memory takes up to twice as much, the next power of two.
    """
    num_layers, _, num_words = words.shape
    blocks = torch.zeros((num_host_blocks, num_layers, num_words), dtype=words.dtype)
    if words.device.type != "cuda":
        return blocks
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pointer = blocks.data_ptr()
    if cuda.cudaHostRegister(pointer, blocks.nbytes, 0) != cuda.cudaError.success:
        raise MemoryError(
            f"{blocks.nbytes / 2**30:.1f} GiB of host memory for swapped KV blocks could not be pinned; "
            f"give less to --swap-space, or raise the limit of locked memory (ulimit -l)."
        )
    weakref.finalize(blocks, cuda.cudaHostUnregister, pointer)
    return blocks


def _as_words(data: torch.Tensor) -> torch.Tensor:  # [num_layers, num_blocks, words]
    """Whole blocks as integers of the largest size that divides them: what is only moved needs no dtype.

    A block holds keys and as many values: an even number of bytes.
    """
    blocks = data.flatten(2)
    num_bytes = blocks.shape[2] * blocks.element_size()
    return blocks.view(
        next(dtype for dtype in (torch.int64, torch.int32, torch.int16) if not num_bytes % dtype.itemsize)
    )
