"""Plain tensor operations on blocks that several backends share: the KV scatter and whole-block copies.

Works on any device and dtype. Knows no attention.
"""

import torch

from kernels.attention.metadata import KVLayer


def scatter_kv(key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, slot_mapping: torch.Tensor) -> None:
    """Write each token's key and value to its slot, converted to the cache's dtype; slot -1 writes nothing.

    Args:
        key: [num_tokens, num_kv_heads, head_dim].
        value: [num_tokens, num_kv_heads, head_dim].
        kv_layer: the layer written to.
        slot_mapping: [num_tokens] int64.
    """
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block_ids, offsets = slots // kv_layer.block_size, slots % kv_layer.block_size
    kv_layer.key[block_ids, :, offsets] = key[written].to(kv_layer.key.dtype)
    kv_layer.value[block_ids, :, offsets] = value[written].to(kv_layer.value.dtype)


def copy_blocks(kv_layer: KVLayer, block_copies: torch.Tensor) -> None:
    """Copy whole blocks within a layer.

    Args:
        kv_layer: the layer copied in.
        block_copies: [num_copies, 2] int64, src and dst; no dst is the src of another pair.
    """
    src, dst = block_copies.unbind(dim=1)
    kv_layer.key[dst] = kv_layer.key[src]
    kv_layer.value[dst] = kv_layer.value[src]
