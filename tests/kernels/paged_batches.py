"""Random batches over a paged cache, with everything poisoned that no backend may trust, and the float64 oracle."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer
from kernels.attention.reference import ReferenceBackend
from kernels.kv_quant import dequantise, quantise

POISONED_BLOCK_ID = 1 << 29
NUM_SPARE_BLOCKS = 5

# Norm of the error over the norm of the float64 result.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@dataclass(frozen=True, slots=True)
class Shape:
    """The heads and blocks of a batch."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The inputs of one `attend`: rows of `query_lens` last tokens of sequences of `seq_lens` tokens."""

    query: torch.Tensor  # [num_tokens, num_q_heads, head_dim]
    kv_layer: KVLayer
    metadata: AttentionMetadata


def make_metadata(
    query_lens: list[int], seq_lens: list[int], block_ids: list[list[int]], block_size: int
) -> AttentionMetadata:
    """Metadata of the given rows; table entries past a sequence's last block are poisoned."""
    width = max([len(ids) for ids in block_ids], default=0) + 2
    tables = [ids + [POISONED_BLOCK_ID] * (width - len(ids)) for ids in block_ids]
    starts = [0]
    slots = []
    for query_len, seq_len, ids in zip(query_lens, seq_lens, block_ids, strict=True):
        starts.append(starts[-1] + query_len)
        slots += [ids[p // block_size] * block_size + p % block_size for p in range(seq_len - query_len, seq_len)]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32).reshape(len(seq_lens), width),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        host_query_start_loc=np.array(starts, dtype=np.int32),
        host_seq_lens=np.array(seq_lens, dtype=np.int32),
    )


def make_kv_layer(shape: Shape, num_blocks: int) -> KVLayer:
    """A layer as the KV cache lays it out, keys and values of a block side by side, full of NaN."""
    size = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    data = torch.full(size, torch.nan, dtype=shape.dtype)
    return KVLayer(key=data[:, 0], value=data[:, 1])


def make_batch(shape: Shape, query_lens: list[int], seq_lens: list[int], seed: int = 0) -> PagedBatch:
    """Random sequences in randomly scattered blocks; unused blocks and the tails of last blocks hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_needed = [-(-n // shape.block_size) for n in seq_lens]
    num_blocks = sum(num_needed) + NUM_SPARE_BLOCKS
    free = torch.randperm(num_blocks, generator=generator).tolist()
    block_ids = [[free.pop() for _ in range(n)] for n in num_needed]
    kv_layer = make_kv_layer(shape, num_blocks)
    for seq_len, ids in zip(seq_lens, block_ids, strict=True):
        for i, block_id in enumerate(ids):
            count = min(shape.block_size, seq_len - i * shape.block_size)
            for cache in (kv_layer.key, kv_layer.value):
                values = torch.randn(shape.num_kv_heads, count, shape.head_dim, generator=generator)
                cache[block_id, :, :count] = values.to(shape.dtype)
    query = torch.randn(sum(query_lens), shape.num_q_heads, shape.head_dim, generator=generator).to(shape.dtype)
    return PagedBatch(query, kv_layer, make_metadata(query_lens, seq_lens, block_ids, shape.block_size))


def requery(batch: PagedBatch, rows: list[int], query_lens: list[int], seq_lens: list[int]) -> PagedBatch:
    """Other query tokens over the cache of a batch whose rows were queried whole: steps of the same sequences.

    Args:
        batch: every row's query has the length of its sequence.
        rows: row of `batch` that each new row continues.
        query_lens: query tokens of each new row.
        seq_lens: tokens of its sequence that the cache is taken to hold.
    """
    starts = batch.metadata.host_query_start_loc.tolist()
    block_size = batch.kv_layer.block_size
    block_ids = [
        batch.metadata.block_tables[r, : -(-n // block_size)].tolist() for r, n in zip(rows, seq_lens, strict=True)
    ]
    spans = [slice(starts[r] + n - q, starts[r] + n) for r, q, n in zip(rows, query_lens, seq_lens, strict=True)]
    query = torch.cat([batch.query[span] for span in spans])
    return PagedBatch(query, batch.kv_layer, make_metadata(query_lens, seq_lens, block_ids, block_size))


def quantise_batch(batch: PagedBatch, dtype: torch.dtype) -> tuple[PagedBatch, PagedBatch]:
    """The batch over a quantised cache, and over the cache that it stands for, in float64.

    Scales of unused slots are NaN, like the keys and values there; their numbers are arbitrary.
    """
    stored, exact = [], []
    for cache in (batch.kv_layer.key, batch.kv_layer.value):
        values, scales = quantise(cache.float(), dtype)
        is_unused = cache[..., 0].isnan()
        scales[is_unused] = torch.nan
        values.view(torch.uint8)[is_unused] = 1
        stored.append((values, scales))
        exact.append(dequantise(values, scales).double())
    (key, key_scale), (value, value_scale) = stored
    return (
        dataclasses.replace(batch, kv_layer=KVLayer(key, value, key_scale, value_scale)),
        dataclasses.replace(batch, kv_layer=KVLayer(*exact)),
    )


def spread_blocks(batch: PagedBatch, block_stride: int) -> PagedBatch:
    """The same batch over a cache whose blocks lie so many elements apart; the memory between is never touched."""
    num_blocks = batch.kv_layer.key.shape[0]
    memory = torch.empty(2 * num_blocks * block_stride, dtype=batch.kv_layer.key.dtype)
    caches = []
    for index, cache in enumerate((batch.kv_layer.key, batch.kv_layer.value)):
        strides = (2 * block_stride, *cache.contiguous().stride()[1:])
        caches.append(memory.as_strided(cache.shape, strides, index * block_stride).copy_(cache))
    return dataclasses.replace(batch, kv_layer=KVLayer(*caches))


def oracle(batch: PagedBatch, params: AttentionParams) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim] float64
    """The exact attention of the batch's own (rounded) inputs."""
    return ReferenceBackend().attend(batch.query.double(), batch.kv_layer, batch.metadata, params)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected; NaN where either holds one."""
    difference = torch.linalg.vector_norm(actual.double() - expected)
    return float(difference / torch.linalg.vector_norm(expected))
