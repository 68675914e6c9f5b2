"""Every backend against the float64 oracle: head ratios, head sizes, block sizes, dtypes and kinds of batches."""

import dataclasses

import numpy as np
import pytest
import torch

from kernels.attention.backend import AttentionBackend
from kernels.attention.metadata import AttentionMetadata, AttentionParams
from kernels.attention.reference import ReferenceBackend
from tests.kernels.paged_batches import (
    TOLERANCES,
    PagedBatch,
    Shape,
    make_batch,
    oracle,
    quantise_batch,
    relative_error,
)

HEADS = [(4, 4), (8, 2), (14, 2), (9, 3), (8, 1), (9, 1), (7, 1)]
HEAD_DIMS = [16, 64, 80, 96, 128, 256]
BLOCK_SIZES = [16, 32, 64]
# Every head ratio meets every block size, and every head size three ratios; a full product would take minutes.
SHAPES = [
    Shape(*heads, HEAD_DIMS[(i + 2 * j) % len(HEAD_DIMS)], block_size)
    for i, heads in enumerate(HEADS)
    for j, block_size in enumerate(BLOCK_SIZES)
]
PLAIN = Shape(8, 2, 64, 16)

# Query lengths and sequence lengths per row; a tile is 64 keys, 16 to 64 query rows.
BATCHES = {
    "one token": ([1], [1]),
    "decodes": ([1, 1, 1, 1], [1, 16, 17, 150]),
    "decodes at tile edges": ([1, 1, 1, 1], [63, 64, 65, 128]),
    "prefills": ([5, 33], [5, 33]),
    "prefill at tile edges": ([64, 16], [64, 16]),
    "chunks": ([7, 64], [70, 128]),
    "one-token prompts": ([1, 1, 1], [1, 1, 1]),
    "mixed": ([1, 1, 2, 1, 20], [40, 1, 66, 129, 20]),
    "several query tokens of decodes": ([2, 3, 4, 8], [64, 65, 100, 64]),
    "tiles that end at tile edges": ([4, 16], [64, 128]),
    "decodes beside a prefill": ([1, 1, 40], [130, 200, 100]),
    "a row without queries": ([1, 0, 3], [20, 5, 9]),
}


def check(backend: AttentionBackend, batch: PagedBatch, params: AttentionParams) -> None:
    out = backend.attend(batch.query, batch.kv_layer, batch.metadata, params)
    assert out.dtype == batch.query.dtype
    assert out.shape == batch.query.shape
    assert relative_error(out, oracle(batch, params)) < TOLERANCES[batch.query.dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(backend: AttentionBackend, shape: Shape) -> None:
    batch = make_batch(shape, [1, 1, 9, 3], [1, 70, 9, 66])
    check(backend, batch, AttentionParams(scale=shape.head_dim**-0.5))


@pytest.mark.full
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_shape(
    backend: AttentionBackend, heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    batch = make_batch(Shape(*heads, head_dim, block_size, dtype), [1, 1, 9, 3], [1, 70, 9, 66])
    check(backend, batch, AttentionParams(scale=head_dim**-0.5))


@pytest.mark.parametrize("kind", BATCHES)
def test_batches(backend: AttentionBackend, kind: str) -> None:
    batch = make_batch(PLAIN, *BATCHES[kind], seed=1)
    check(backend, batch, AttentionParams(scale=0.125))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(backend: AttentionBackend, dtype: torch.dtype) -> None:
    shape = dataclasses.replace(PLAIN, head_dim=80, dtype=dtype)
    batch = make_batch(shape, *BATCHES["mixed"])
    check(backend, batch, AttentionParams(scale=80**-0.5))


@pytest.mark.parametrize("sliding_window", [1, 16, 37, 64, 1000])
@pytest.mark.parametrize("kind", ["decodes", "mixed", "decodes beside a prefill"])
def test_sliding_window(backend: AttentionBackend, kind: str, sliding_window: int) -> None:
    batch = make_batch(PLAIN, *BATCHES[kind], seed=2)
    check(backend, batch, AttentionParams(scale=0.125, sliding_window=sliding_window))


def test_blocks_before_the_window_are_not_read(every_backend: AttentionBackend) -> None:
    batch = make_batch(PLAIN, [1, 6], [100, 90])
    params = AttentionParams(scale=0.125, sliding_window=20)
    expected = oracle(batch, params)
    first_visible = [100 - 20, 90 - 6 + 1 - 20]
    for row, key in enumerate(first_visible):
        for table_entry in range(key // 16):
            block_id = int(batch.metadata.block_tables[row, table_entry])
            batch.kv_layer.key[block_id] = torch.nan
            batch.kv_layer.value[block_id] = torch.nan
            batch.metadata.block_tables[row, table_entry] = 1 << 29
    out = every_backend.attend(batch.query, batch.kv_layer, batch.metadata, params)
    assert relative_error(out, expected) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("logit_softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("logit_size", [1.0, 1000.0])
def test_soft_cap(backend: AttentionBackend, logit_softcap: float, logit_size: float) -> None:
    batch = make_batch(PLAIN, *BATCHES["mixed"], seed=3)
    check(backend, batch, AttentionParams(scale=0.125 * logit_size, logit_softcap=logit_softcap))


def test_soft_cap_with_sliding_window(backend: AttentionBackend) -> None:
    batch = make_batch(PLAIN, *BATCHES["mixed"], seed=4)
    check(backend, batch, AttentionParams(scale=0.125, sliding_window=33, logit_softcap=30.0))


def test_large_logits_without_cap(backend: AttentionBackend) -> None:
    """Scores of hundreds: exp without the running maximum would overflow. Float32 scores bound the precision."""
    batch = make_batch(PLAIN, *BATCHES["mixed"], seed=5)
    params = AttentionParams(scale=5.0)
    out = backend.attend(batch.query, batch.kv_layer, batch.metadata, params)
    assert relative_error(out, oracle(batch, params)) < 1e-4


def test_masked_values_have_no_weight(backend: AttentionBackend) -> None:
    """A weight of 2^-127 instead of 0 for the last token would show in the tokens before it."""
    batch = make_batch(PLAIN, [20], [20], seed=8)
    params = AttentionParams(scale=0.125)
    expected = oracle(batch, params)
    batch.kv_layer.value[batch.metadata.block_tables[0, 1], :, 19 - 16] = 1e38
    out = backend.attend(batch.query, batch.kv_layer, batch.metadata, params)
    assert relative_error(out[:19], expected[:19]) < TOLERANCES[torch.float32]


def test_query_of_a_packed_product(backend: AttentionBackend) -> None:
    """Queries are a slice of the packed QKV product: rows are not contiguous."""
    batch = make_batch(PLAIN, *BATCHES["mixed"], seed=6)
    num_tokens = batch.query.shape[0]
    packed = torch.full((num_tokens, 12, 64), torch.nan)
    packed[:, 2:10] = batch.query
    check(backend, dataclasses.replace(batch, query=packed[:, 2:10]), AttentionParams(scale=0.125))


def test_padding(every_backend: AttentionBackend) -> None:
    """Tokens and rows that pad a batch to a fixed size change nothing and give zeros."""
    batch = make_batch(PLAIN, [1, 1, 4], [30, 70, 9], seed=7)
    params = AttentionParams(scale=0.125)
    plain, num_padding = batch.metadata, 3
    padded = AttentionMetadata(
        query_start_loc=torch.cat([plain.query_start_loc, torch.tensor([7, 8], dtype=torch.int32)]),
        seq_lens=torch.cat([plain.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        block_tables=torch.cat([plain.block_tables, torch.full_like(plain.block_tables[:2], 1 << 29)]),
        slot_mapping=torch.cat([plain.slot_mapping, torch.full((num_padding,), -1)]),
        host_query_start_loc=np.append(plain.host_query_start_loc, [7, 8]).astype(np.int32),
        host_seq_lens=np.append(plain.host_seq_lens, [0, 0]).astype(np.int32),
    )
    query = torch.cat([batch.query, torch.randn(num_padding, 8, 64)])
    out = every_backend.attend(query, batch.kv_layer, padded, params)
    assert relative_error(out[:6], oracle(batch, params)) < TOLERANCES[torch.float32]
    assert torch.equal(out[6:], torch.zeros(num_padding, 8, 64))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sliding_window", [None, 21])
def test_quantised_cache(
    backend: AttentionBackend, dtype: torch.dtype, query_dtype: torch.dtype, sliding_window: int | None
) -> None:
    """Exact for the cache that the numbers and scales stand for: what quantising costs is not in question here."""
    shape = Shape(6, 2, 32, 16, query_dtype)
    batch, exact = quantise_batch(make_batch(shape, *BATCHES["mixed"], seed=9), dtype)
    params = AttentionParams(scale=32**-0.5, sliding_window=sliding_window)
    out = backend.attend(batch.query, batch.kv_layer, batch.metadata, params)
    assert relative_error(out, oracle(exact, params)) < TOLERANCES[query_dtype]


def test_empty_batch(every_backend: AttentionBackend) -> None:
    batch = make_batch(PLAIN, [], [])
    out = every_backend.attend(batch.query, batch.kv_layer, batch.metadata, AttentionParams(scale=0.125))
    assert out.shape == (0, 8, 64)


@pytest.mark.parametrize("sliding_window", [None, 11])
def test_reference_against_torch(sliding_window: int | None) -> None:
    """The oracle itself against dense attention with an explicit mask, in float64."""
    shape = Shape(6, 3, 16, 16, torch.float64)
    batch = make_batch(shape, [5], [40])
    block_ids = batch.metadata.block_tables[0, :3].long()
    keys, values = (
        cache[block_ids].transpose(0, 1).flatten(1, 2)[:, :40] for cache in (batch.kv_layer.key, batch.kv_layer.value)
    )
    query_positions, key_positions = torch.arange(35, 40)[:, None], torch.arange(40)[None, :]
    mask = key_positions <= query_positions
    if sliding_window is not None:
        mask &= key_positions > query_positions - sliding_window
    expected = torch.nn.functional.scaled_dot_product_attention(
        batch.query.transpose(0, 1), keys, values, attn_mask=mask, scale=0.25, enable_gqa=True
    ).transpose(0, 1)
    params = AttentionParams(scale=0.25, sliding_window=sliding_window)
    out = ReferenceBackend().attend(batch.query, batch.kv_layer, batch.metadata, params)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
