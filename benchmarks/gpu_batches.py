"""Batches over a paged cache on a device, at the sizes of real use, with their bytes and operations counted.

Owns shapes and counts; runs and times nothing.
"""

import dataclasses
from dataclasses import dataclass

import torch

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer
from kernels.kv_quant import quantise
from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec
from tests.kernels.paged_batches import make_metadata

BLOCK_SIZE = 16  # the server's default


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention layer; by default those of Llama 3.1 8B."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def params(self) -> AttentionParams:
        """Plain causal attention."""
        return AttentionParams(scale=self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Rows:
    """Query tokens and tokens in the cache of each row, decodes first."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    def __add__(self, other: "Rows") -> "Rows":
        """Both in one batch."""
        return Rows(self.query_lens + other.query_lens, self.seq_lens + other.seq_lens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one `attend` on the device."""

    heads: Heads
    rows: Rows
    query: torch.Tensor  # [num_tokens, num_q_heads, head_dim]
    kv_layer: KVLayer
    metadata: AttentionMetadata

    @property
    def num_bytes(self) -> int:
        """The fewest bytes that move: every key and value once, with their scales, and query and output."""
        cache = sum(self.rows.seq_lens) * self.heads.num_kv_heads * bytes_per_key(self.heads, self.kv_layer)
        return cache + 2 * self.query.numel() * self.query.element_size()

    @property
    def num_flops(self) -> int:
        """Operations of both products over visible keys alone: about half of those of a full square."""
        visible = sum(
            query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2
            for query_len, seq_len in zip(self.rows.query_lens, self.rows.seq_lens, strict=True)
        )
        return 4 * self.heads.head_dim * self.heads.num_q_heads * visible


def bytes_per_key(heads: Heads, layer: KVLayer) -> int:
    """Of a key and its value in one head of the cache, with their scales."""
    scale = 0 if layer.key_scale is None else layer.key_scale.element_size()
    return 2 * (heads.head_dim * layer.key.element_size() + scale)


def decodes(num_rows: int, seq_len: int) -> Rows:
    """One query token after each of `num_rows` contexts."""
    return Rows((1,) * num_rows, (seq_len,) * num_rows)


def prefills(num_rows: int, seq_len: int) -> Rows:
    """Whole prompts."""
    return Rows((seq_len,) * num_rows, (seq_len,) * num_rows)


def make_batch(
    heads: Heads,
    rows: Rows,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: str | None = None,
    block_size: int = BLOCK_SIZE,
    in_order: bool = False,
) -> Batch:
    """A batch of random numbers.

    Args:
        heads: of the layer.
        rows: of the batch.
        device: where it goes.
        dtype: of the queries, and of the cache unless it has one of its own.
        cache_dtype: "int8" or "float8_e4m3fn" for a quantised cache.
        block_size: tokens per block.
        in_order: blocks lie one after another, in place of anywhere.
    """
    num_blocks = [-(-seq_len // block_size) for seq_len in rows.seq_lens]
    order = torch.arange(sum(num_blocks)) if in_order else torch.randperm(sum(num_blocks))
    block_ids = [ids.tolist() for ids in order.split(num_blocks)]
    return Batch(
        heads,
        rows,
        random_query(heads, sum(rows.query_lens), dtype, device),
        random_layer(heads, sum(num_blocks), block_size, device, cache_dtype or _name(dtype)),
        on_device(make_metadata(list(rows.query_lens), list(rows.seq_lens), block_ids, block_size), device),
    )


def random_query(heads: Heads, num_tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[num_tokens, num_q_heads, head_dim]."""
    return torch.randn(num_tokens, heads.num_q_heads, heads.head_dim, dtype=dtype, device=device)


def random_layer(heads: Heads, num_blocks: int, block_size: int, device: torch.device, dtype: str) -> KVLayer:
    """A layer as the server's cache lays it out, full of random keys and values."""
    spec = KVCacheSpec(1, heads.num_kv_heads, heads.head_dim, block_size, dtype)
    layer = KVCache(spec, num_blocks, device).layers[0]
    for cache, scales in ((layer.key, layer.key_scale), (layer.value, layer.value_scale)):
        if scales is None:
            cache.normal_()
            continue
        values, scale = quantise(torch.randn(cache.shape, device=device), cache.dtype)
        cache.copy_(values)
        scales.copy_(scale)
    return layer


def on_device(metadata: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    """The same with its tensors on the device; the host's copies stay."""
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(metadata)
        if isinstance(value := getattr(metadata, field.name), torch.Tensor)
    }
    return dataclasses.replace(metadata, **moved)


def contiguous(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys and values of rows of one length, as plain tensors.

    Returns:
        [num_rows, num_q_heads, query_len, head_dim], and twice [num_rows, num_kv_heads, seq_len, head_dim].
    """
    num_rows, seq_len, block_size = len(batch.rows.seq_lens), batch.rows.seq_lens[0], batch.kv_layer.block_size
    tables = batch.metadata.block_tables[:, : -(-seq_len // block_size)].long()
    query = batch.query.unflatten(0, (num_rows, -1)).transpose(1, 2).contiguous()
    keys, values = (
        # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
        cache[tables].transpose(1, 2).flatten(2, 3)[:, :, :seq_len].contiguous()
        for cache in (batch.kv_layer.key, batch.kv_layer.value)
    )
    return query, keys, values


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
