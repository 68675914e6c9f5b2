"""What only the native CPU backend promises: each instruction set, any ragged batch, any thread count, clear errors."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.cpu import CpuBackend
from kernels.attention.metadata import AttentionParams, KVLayer, Rotation
from kernels.cpu.native_library import INSTRUCTION_SETS, load_library, supported_instruction_sets
from kernels.kv_quant import QUANTISED_MAX, quantise
from tests.kernels.conftest import make_backend
from tests.kernels.paged_batches import (
    TOLERANCES,
    PagedBatch,
    Shape,
    make_batch,
    oracle,
    quantise_batch,
    relative_error,
)

PARAMS = AttentionParams(scale=0.125)


@pytest.fixture(autouse=True)
def needs_library() -> None:
    """Skips where there is no compiler, fails where there is one and no library."""
    make_backend("cpu")


@pytest.fixture(scope="module")
def restore_threads() -> Iterator[None]:
    """For tests that change torch's number of threads."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def native(instruction_set: str) -> CpuBackend:
    if instruction_set not in supported_instruction_sets(load_library()):
        pytest.skip(f"this processor lacks {instruction_set}")
    return CpuBackend(instruction_set)


ragged_rows = st.lists(
    st.one_of(st.just(1), st.integers(1, 80)).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, q + 150))),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=60)
@given(
    rows=ragged_rows,
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (7, 1), (14, 2), (40, 1)]),
    head_dim=st.integers(1, 70),
    block_size=st.sampled_from([1, 5, 16, 64, 100]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    sliding_window=st.none() | st.integers(1, 200),
    logit_softcap=st.none() | st.floats(0.5, 60),
    instruction_set=st.sampled_from(list(INSTRUCTION_SETS)),
    seed=st.integers(0, 2**32),
)
def test_ragged_batches(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None,
    logit_softcap: float | None,
    instruction_set: str,
    seed: int,
) -> None:
    if instruction_set not in supported_instruction_sets(load_library()):
        instruction_set = "generic"
    query_lens, seq_lens = (list(column) for column in zip(*sorted(rows), strict=True))
    batch = make_batch(Shape(*heads, head_dim, block_size, dtype), query_lens, seq_lens, seed)
    params = AttentionParams(head_dim**-0.5, sliding_window, logit_softcap)
    out = CpuBackend(instruction_set).attend(batch.query, batch.kv_layer, batch.metadata, params)
    # Relative to the average of the values' sizes: an average of a few numbers may by chance lie next to 0.
    sizes = KVLayer(key=batch.kv_layer.key, value=batch.kv_layer.value.abs())
    size = torch.linalg.vector_norm(oracle(dataclasses.replace(batch, kv_layer=sizes), params))
    error = torch.linalg.vector_norm(out.double() - oracle(batch, params))
    assert error < TOLERANCES[dtype] * size


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("head_dim", [2, 64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_instruction_sets(instruction_set: str, head_dim: int, dtype: torch.dtype) -> None:
    batch = make_batch(Shape(9, 3, head_dim, 16, dtype), [1, 1, 20, 70], [100, 1, 64, 70])
    params = AttentionParams(scale=head_dim**-0.5, logit_softcap=20.0)
    out = native(instruction_set).attend(batch.query, batch.kv_layer, batch.metadata, params)
    assert relative_error(out, oracle(batch, params)) < TOLERANCES[dtype]


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_query_and_cache_of_different_dtypes(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    batch = make_batch(Shape(8, 2, 64, 16, cache_dtype), [1, 9], [70, 66])
    batch = dataclasses.replace(batch, query=batch.query.to(query_dtype))
    out = make_backend("cpu").attend(batch.query, batch.kv_layer, batch.metadata, PARAMS)
    assert relative_error(out, oracle(batch, PARAMS)) < TOLERANCES[query_dtype]


def test_half_precision_conversions() -> None:
    """Every float16 and bfloat16 value through a cache of one token, whose weight is exactly 1, and back."""
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        data = torch.zeros(1024, 1, 1, 64, dtype=dtype)
        kv_layer = KVLayer(key=torch.zeros_like(data), value=values.view(data.shape))
        batch = make_batch(Shape(1, 1, 64, 1, dtype), [1] * 1024, [1] * 1024)
        block_tables = torch.arange(1024, dtype=torch.int32)[:, None].repeat(1, 2)
        metadata = dataclasses.replace(batch.metadata, block_tables=block_tables)
        out = make_backend("cpu").attend(torch.zeros(1024, 1, 64, dtype=dtype), kv_layer, metadata, PARAMS)
        torch.testing.assert_close(out.flatten(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("source_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_half_precision(source_dtype: torch.dtype) -> None:
    """Float32 results are rounded as torch rounds them: ties to even, subnormals, overflow to infinity."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 20, (64, 1, 1, 64), generator=generator)
    values = torch.randn(64, 1, 1, 64, generator=generator) * 2.0**exponents
    values[0, 0, 0] = torch.linspace(2048, 2048 + 63, 64)  # float16 steps by 2 there: every second one is a tie
    kv_layer = KVLayer(key=torch.zeros_like(values), value=values)
    batch = make_batch(Shape(1, 1, 64, 1), [1] * 64, [1] * 64)
    block_tables = torch.arange(64, dtype=torch.int32)[:, None].repeat(1, 2)
    metadata = dataclasses.replace(batch.metadata, block_tables=block_tables)
    out = make_backend("cpu").attend(torch.zeros(64, 1, 64, dtype=source_dtype), kv_layer, metadata, PARAMS)
    assert torch.equal(out.flatten(), values.flatten().to(source_dtype))


@pytest.mark.usefixtures("restore_threads")
@settings(deadline=None, max_examples=60)
@given(
    rows=ragged_rows,
    heads=st.sampled_from([(1, 1), (6, 2), (7, 1), (40, 1)]),
    head_dim=st.sampled_from([1, 24, 64, 70]),
    block_size=st.sampled_from([5, 16, 100]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    sliding_window=st.none() | st.integers(1, 200),
    logit_softcap=st.none() | st.floats(0.5, 60),
    instruction_set=st.sampled_from(list(INSTRUCTION_SETS)),
    chunk_size=st.integers(1, 90),
    seed=st.integers(0, 2**32),
)
def test_output_does_not_depend_on_batch_chunks_or_threads(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None,
    logit_softcap: float | None,
    instruction_set: str,
    chunk_size: int,
    seed: int,
) -> None:
    """All rows at once on three threads equal every row alone, cut into chunks, on one thread, bit for bit."""
    if instruction_set not in supported_instruction_sets(load_library()):
        instruction_set = "generic"
    backend = CpuBackend(instruction_set)
    query_lens, seq_lens = (list(column) for column in zip(*sorted(rows), strict=True))
    batch = make_batch(Shape(*heads, head_dim, block_size, dtype), query_lens, seq_lens, seed)
    params = AttentionParams(head_dim**-0.5, sliding_window, logit_softcap)
    torch.set_num_threads(3)
    together = backend.attend(batch.query, batch.kv_layer, batch.metadata, params)
    torch.set_num_threads(1)
    starts = batch.metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens):
        for begin in range(starts[row], starts[row + 1], chunk_size):
            end = min(begin + chunk_size, starts[row + 1])
            metadata = dataclasses.replace(
                batch.metadata,
                query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
                seq_lens=torch.tensor([seq_len - (starts[row + 1] - end)], dtype=torch.int32),
                block_tables=batch.metadata.block_tables[row : row + 1],
            )
            out = backend.attend(batch.query[begin:end], batch.kv_layer, metadata, params)
            assert torch.equal(out, together[begin:end])


CACHE_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def with_cache(batch: PagedBatch, dtype: torch.dtype) -> tuple[PagedBatch, PagedBatch]:
    """The batch over a cache of that dtype, and over the one that it stands for, in float64."""
    if dtype in QUANTISED_MAX:
        return quantise_batch(batch, dtype)
    rounded = KVLayer(batch.kv_layer.key.to(dtype), batch.kv_layer.value.to(dtype))
    return dataclasses.replace(batch, kv_layer=rounded), dataclasses.replace(batch, kv_layer=rounded)


def attend_alone(
    backend: CpuBackend, batch: PagedBatch, row: int, first: int, last: int, params: AttentionParams
) -> torch.Tensor:
    """Query tokens [first, last) of one row, by themselves."""
    begin, end = batch.metadata.query_start_loc[row : row + 2].tolist()
    metadata = dataclasses.replace(
        batch.metadata,
        query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
        seq_lens=batch.metadata.seq_lens[row : row + 1] - (end - begin - last),
        block_tables=batch.metadata.block_tables[row : row + 1],
    )
    return backend.attend(batch.query[begin + first : begin + last], batch.kv_layer, metadata, params)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("sliding_window", [None, 300])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_shared_out_to_threads(
    query_dtype: torch.dtype, cache_dtype: torch.dtype, instruction_set: str, sliding_window: int | None
) -> None:
    """One long sequence, whose keys several threads share: right, and bitwise that of one thread, chunked or not."""
    backend = native(instruction_set)
    batch, exact = with_cache(make_batch(Shape(4, 1, 40, 16), [21, 1], [700, 1100], seed=3), cache_dtype)
    batch = dataclasses.replace(batch, query=batch.query.to(query_dtype))
    params = AttentionParams(40**-0.5, sliding_window)
    torch.set_num_threads(4)
    together = backend.attend(batch.query, batch.kv_layer, batch.metadata, params)
    expected = oracle(dataclasses.replace(exact, query=batch.query), params)
    assert relative_error(together, expected) < TOLERANCES[query_dtype]
    for num_threads in (1, 4):
        torch.set_num_threads(num_threads)
        assert torch.equal(attend_alone(backend, batch, 1, 0, 1, params), together[21:])
        for first, last in ((0, 1), (1, 13), (13, 21)):
            assert torch.equal(attend_alone(backend, batch, 0, first, last, params), together[first:last])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("cache_dtype", QUANTISED_MAX, ids=str)
@pytest.mark.parametrize("head_dim", [2, 33, 80, 256])
@pytest.mark.parametrize("query_dtype", TOLERANCES, ids=str)
def test_quantised_cache(
    query_dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype, instruction_set: str
) -> None:
    batch = make_batch(Shape(6, 2, head_dim, 5), [1, 20, 3], [70, 66, 300])
    batch, exact = quantise_batch(dataclasses.replace(batch, query=batch.query.to(query_dtype)), cache_dtype)
    params = AttentionParams(head_dim**-0.5, logit_softcap=20.0)
    out = native(instruction_set).attend(batch.query, batch.kv_layer, batch.metadata, params)
    assert relative_error(out, oracle(exact, params)) < TOLERANCES[query_dtype]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_a_broken_number_is_not_hidden(place: str, cache_dtype: torch.dtype, instruction_set: str) -> None:
    """NaN reaches every token that sees it: in the query, in a key or a value, or in the scale of a quantised one."""
    batch = make_batch(Shape(2, 1, 32, 16), [6], [300])
    if place == "query":
        batch.query[3, :, 5] = torch.nan
    else:
        getattr(batch.kv_layer, place)[batch.metadata.block_tables[0, 297 // 16], 0, 297 % 16] = torch.nan
    batch, _ = with_cache(batch, cache_dtype)
    out = native(instruction_set).attend(batch.query.bfloat16(), batch.kv_layer, batch.metadata, PARAMS)
    is_broken = out.isnan().flatten(1).any(1)
    assert is_broken[3]
    assert is_broken[4:].all() == (place != "query")
    assert place == "value" or not is_broken[:3].any()  # 0 times NaN is NaN: a value breaks its whole tile


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", QUANTISED_MAX, ids=str)
@pytest.mark.parametrize("source_dtype", TOLERANCES, ids=str)
def test_quantised_writes(source_dtype: torch.dtype, dtype: torch.dtype, instruction_set: str) -> None:
    """Bit for bit what `quantise` gives, for any head size: ties, zeros, tiny and huge numbers, whole float8 steps."""
    backend = native(instruction_set)
    generator = torch.Generator().manual_seed(0)
    for head_dim in (1, 15, 64, 70):
        rows = torch.randn(40, 2, head_dim, generator=generator)
        rows *= 2.0 ** torch.randint(-14, 15, (40, 2, 1), generator=generator)
        rows[1] = 0
        rows[2] = 1e-38
        rows[3] = torch.randint(-896, 897, (2, head_dim), generator=generator) / 2  # ties, subnormals and whole numbers
        rows[3, :, 0] = QUANTISED_MAX[dtype]
        rows[4] = 2.0 ** -torch.randint(0, 20, (2, head_dim), generator=generator)
        rows = rows.to(source_dtype)
        data = torch.zeros(40, 2, 2, 1, head_dim).to(dtype)
        scales = torch.zeros(data.shape[:-1])
        kv_layer = KVLayer(data[:, 0], data[:, 1], scales[:, 0], scales[:, 1])
        metadata = dataclasses.replace(small_batch().metadata, slot_mapping=torch.arange(40))
        backend.write_kv(rows, -rows, kv_layer, metadata)
        for sign, stored, stored_scales in ((1, data[:, 0], scales[:, 0]), (-1, data[:, 1], scales[:, 1])):
            values, row_scales = quantise(sign * rows, dtype)
            assert torch.equal(stored[:, :, 0].float(), values.float())
            assert torch.equal(stored_scales[:, :, 0], row_scales)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", QUANTISED_MAX, ids=str)
def test_rotate_and_write_to_a_quantised_cache(dtype: torch.dtype, instruction_set: str) -> None:
    """What a float32 cache would hold, quantised; queries are those of a float32 cache."""
    backend = native(instruction_set)
    heads = torch.randn(9, 10, 48, generator=torch.Generator().manual_seed(0))
    angles = torch.randn(9, 24)
    rotation = Rotation(angles.cos(), angles.sin(), torch.randn(8, 48), 1e-6)
    metadata = dataclasses.replace(small_batch().metadata, slot_mapping=torch.tensor([8, 3, -1, 0, 5, 17, 30, 31, 2]))
    plain = KVLayer(torch.zeros(8, 2, 4, 48), torch.zeros(8, 2, 4, 48))
    query = backend.rotate_and_write(heads, rotation, plain, metadata)
    scales = torch.zeros(2, 8, 2, 4)
    quantised = KVLayer(
        plain.key.new_zeros(8, 2, 4, 48).to(dtype), plain.value.new_zeros(8, 2, 4, 48).to(dtype), *scales
    )
    assert torch.equal(backend.rotate_and_write(heads, rotation, quantised, metadata), query)
    is_written = plain.key.abs().amax(-1) > 0
    assert is_written.sum() == 8 * 2
    for source, stored, stored_scales in zip(
        (plain.key, plain.value), (quantised.key, quantised.value), scales, strict=True
    ):
        values, row_scales = quantise(source, dtype)
        assert torch.equal(stored.float(), values.float())
        assert torch.equal(stored_scales, row_scales * is_written)


def test_block_table_sliced_from_a_wider_one() -> None:
    batch = make_batch(Shape(8, 2, 64, 16), [1, 1], [70, 20])
    wide = torch.cat([batch.metadata.block_tables, torch.full((2, 9), -7, dtype=torch.int32)], dim=1)
    metadata = dataclasses.replace(batch.metadata, block_tables=wide[:, :5])
    out = make_backend("cpu").attend(batch.query, batch.kv_layer, metadata, PARAMS)
    assert relative_error(out, oracle(batch, PARAMS)) < TOLERANCES[torch.float32]


def small_batch() -> PagedBatch:
    return make_batch(Shape(8, 2, 64, 16), [1, 5], [70, 20])


@pytest.mark.parametrize("block_id", [-1, 12, 1 << 29])
def test_block_outside_the_cache(block_id: int) -> None:
    batch = small_batch()
    batch.metadata.block_tables[0, 4] = block_id
    with pytest.raises(ValueError, match="a block table names a block outside the cache"):
        make_backend("cpu").attend(batch.query, batch.kv_layer, batch.metadata, PARAMS)


@pytest.mark.parametrize(
    ("field", "values"),
    [("seq_lens", [70, 4]), ("seq_lens", [-3, 20]), ("seq_lens", [1000, 20]), ("query_start_loc", [0, 1, 7])],
)
def test_rows_that_do_not_fit(field: str, values: list[int]) -> None:
    batch = small_batch()
    metadata = dataclasses.replace(batch.metadata, **{field: torch.tensor(values, dtype=torch.int32)})
    with pytest.raises(ValueError, match="do not fit together"):
        make_backend("cpu").attend(batch.query, batch.kv_layer, metadata, PARAMS)


def test_slot_outside_the_cache() -> None:
    batch = small_batch()
    num_slots = batch.kv_layer.key.shape[0] * 16
    slots = torch.tensor([0, 1, 2, 3, 4, num_slots])
    key = torch.ones(6, 2, 64)
    before = batch.kv_layer.key.clone()
    with pytest.raises(ValueError, match="the slot mapping names a slot outside the cache"):
        make_backend("cpu").write_kv(key, key, batch.kv_layer, dataclasses.replace(batch.metadata, slot_mapping=slots))
    torch.testing.assert_close(batch.kv_layer.key, before, rtol=0, atol=0, equal_nan=True)


def test_float64_is_refused() -> None:
    batch = small_batch()
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        make_backend("cpu").attend(batch.query.double(), batch.kv_layer, batch.metadata, PARAMS)


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="'sse9' is not one of"):
        CpuBackend("sse9")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists the libraries of a Linux process")
def test_one_openmp_runtime_in_the_process() -> None:
    """Torch and the library on several threads: one runtime is mapped, not torch's and the system's."""
    program = """
import re, torch
from kernels.attention.cpu import CpuBackend
from tests.kernels.paged_batches import Shape, make_batch
from kernels.attention.metadata import AttentionParams
torch.set_num_threads(2)
batch = make_batch(Shape(8, 2, 64, 16), [1] * 8, [70] * 8)
CpuBackend().attend(batch.query, batch.kv_layer, batch.metadata, AttentionParams(0.125))
torch.randn(512, 512) @ torch.randn(512, 512)
maps = open("/proc/self/maps").read()
print(*{path for path in re.findall(r"/\\S+", maps) if re.search(r"lib(gomp|iomp5|omp)\\b", path)}, sep="\\n")
"""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, env={**os.environ}, check=True
    )
    assert len(result.stdout.split()) == 1
