"""The device tensors of the paged KV cache. The only file of this package that imports torch."""

import torch

from kernels.attention.metadata import KVLayer
from paged_cache.spec import KVCacheSpec

MAX_COPY_BYTES = 64 << 20  # of a copy's temporary: what activations leave of a GPU's memory is not to be counted on


class KVCache:
    """One `KVLayer` per model layer, allocated once at start-up and never resized."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        """Allocate zeroed blocks: `num_blocks * spec.bytes_per_block` bytes on `device`."""
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
        # One block's keys and values lie side by side, the unit that copies and transfers move.
        self._data = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
        self._scales: torch.Tensor | None = None  # [num_layers, num_blocks, 2, num_kv_heads, block_size] float32
        if spec.is_quantised:
            self._scales = torch.zeros(shape[:-1], dtype=torch.float32, device=device)
        self.layers = [self._layer(index) for index in range(spec.num_layers)]

    def _layer(self, index: int) -> KVLayer:
        key, value = self._data[index].unbind(dim=1)
        if self._scales is None:
            return KVLayer(key, value)
        return KVLayer(key, value, *self._scales[index].unbind(dim=1))

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
        for data in (self._data, self._scales):
            if data is None:
                continue
            words = _as_words(data)
            for first in range(0, self.spec.num_layers, num_layers):
                layers = words[first : first + num_layers]
                layers.index_copy_(1, dst, layers.index_select(1, src))


def _as_words(data: torch.Tensor) -> torch.Tensor:  # [num_layers, num_blocks, words]
    """Whole blocks as integers of the largest size that divides them: what is only moved needs no dtype.

    A block holds keys and as many values: an even number of bytes.
    """
    blocks = data.flatten(2)
    num_bytes = blocks.shape[2] * blocks.element_size()
    return blocks.view(
        next(dtype for dtype in (torch.int64, torch.int32, torch.int16) if not num_bytes % dtype.itemsize)
    )
