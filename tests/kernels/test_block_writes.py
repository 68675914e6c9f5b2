"""`write_kv` of every backend: the right slots, nothing else, any layout of the inputs."""

import pytest
import torch

from kernels.attention.backend import AttentionBackend
from kernels.attention.metadata import AttentionMetadata, KVLayer, Rotation
from kernels.attention.rotation import rotate_heads
from kernels.kv_quant import QUANTISED_MAX, quantise
from tests.kernels.conftest import IS_INTERPRETING
from tests.kernels.paged_batches import Shape, make_kv_layer

NUM_BLOCKS = 9


def metadata_with_slots(slots: list[int]) -> AttentionMetadata:
    """Only the slot mapping matters to a write."""
    nothing = torch.zeros(1, dtype=torch.int32)
    return AttentionMetadata(
        query_start_loc=nothing,
        seq_lens=nothing[:0],
        block_tables=nothing[:0].reshape(0, 1),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        host_query_start_loc=nothing.numpy(),
        host_seq_lens=nothing[:0].numpy(),
    )


def expected_cache(cache: torch.Tensor, rows: torch.Tensor, slots: list[int], block_size: int) -> torch.Tensor:
    """The cache after the write, slot by slot."""
    expected = cache.clone()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            for head in range(cache.shape[1]):
                expected[slot // block_size, head, slot % block_size] = row[head].to(cache.dtype)
    return expected


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "shape", [Shape(9, 3, 64, 16), Shape(8, 1, 80, 32), Shape(4, 4, 2, 3), Shape(4, 4, 256, 64)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_write(every_backend: AttentionBackend, shape: Shape, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    last_slot = NUM_BLOCKS * shape.block_size - 1
    slots = [last_slot, -1, *torch.randperm(last_slot, generator=generator)[:10].tolist(), -1]
    kv_layer = make_kv_layer(Shape(shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, dtype), 9)
    key, value = torch.randn(2, 13, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
    expected_key = expected_cache(kv_layer.key, key, slots, shape.block_size)
    expected_value = expected_cache(kv_layer.value, value, slots, shape.block_size)
    every_backend.write_kv(key, value, kv_layer, metadata_with_slots(slots))
    assert_same(kv_layer.key, expected_key)
    assert_same(kv_layer.value, expected_value)


def test_write_of_a_packed_product(every_backend: AttentionBackend) -> None:
    """Keys and values are slices of the packed QKV product."""
    shape = Shape(4, 2, 16, 16)
    kv_layer = make_kv_layer(shape, NUM_BLOCKS)
    packed = torch.randn(5, 8, 16)
    slots = [100, 3, 64, -1, 17]
    expected_key = expected_cache(kv_layer.key, packed[:, 4:6], slots, 16)
    expected_value = expected_cache(kv_layer.value, packed[:, 6:], slots, 16)
    every_backend.write_kv(packed[:, 4:6], packed[:, 6:], kv_layer, metadata_with_slots(slots))
    assert_same(kv_layer.key, expected_key)
    assert_same(kv_layer.value, expected_value)


def test_write_converts_to_the_dtype_of_the_cache(every_backend: AttentionBackend) -> None:
    kv_layer = make_kv_layer(Shape(2, 2, 16, 16, torch.float16), NUM_BLOCKS)
    key, value = torch.randn(2, 3, 2, 16)
    expected = expected_cache(kv_layer.key, key, [1, 20, 40], 16)
    every_backend.write_kv(key, value, kv_layer, metadata_with_slots([1, 20, 40]))
    # Triton's interpreter truncates where hardware rounds to nearest.
    torch.testing.assert_close(kv_layer.key, expected, rtol=1e-3, atol=1e-6 * IS_INTERPRETING, equal_nan=True)


@pytest.mark.parametrize("is_normed", [False, True], ids=["", "normed"])
def test_rotate_and_write(every_backend: AttentionBackend, is_normed: bool) -> None:
    """Queries, keys and values as float64 has them; padding tokens get their queries too."""
    shape = Shape(6, 2, 64, 16)
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(4, 10, 64, generator=generator)
    angles = torch.randn(4, 32, generator=generator) * 10
    weight = torch.randn(8, 64, generator=generator) if is_normed else None
    rotation = Rotation(angles.cos(), angles.sin(), weight, 1e-5)
    expected_query, key, value = rotate_heads(heads.double(), rotation, 2)
    slots = [100, -1, 64, 17]
    kv_layer = make_kv_layer(shape, NUM_BLOCKS)
    expected_key = expected_cache(kv_layer.key, key, slots, 16)
    expected_value = expected_cache(kv_layer.value, value, slots, 16)
    query = every_backend.rotate_and_write(heads, rotation, kv_layer, metadata_with_slots(slots))
    torch.testing.assert_close(query.double(), expected_query, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv_layer.key, expected_key, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert_same(kv_layer.value, expected_value)


@pytest.mark.parametrize("dtype", QUANTISED_MAX, ids=str)
def test_write_to_a_quantised_cache(every_backend: AttentionBackend, dtype: torch.dtype) -> None:
    """Bit for bit what `quantise` gives, on every backend that takes such a cache."""
    data = torch.zeros(NUM_BLOCKS, 2, 2, 16, 64).to(dtype)
    scales = torch.full(data.shape[:-1], torch.nan)
    kv_layer = KVLayer(data[:, 0], data[:, 1], scales[:, 0], scales[:, 1])
    key, value = torch.randn(2, 4, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = [100, -1, 64, 17]
    every_backend.write_kv(key, value, kv_layer, metadata_with_slots(slots))
    for index, rows in enumerate((key, value)):
        values, row_scales = quantise(rows, dtype)
        expected = expected_cache(torch.zeros(data[:, index].shape), values.float(), slots, 16)
        assert_same(data[:, index].float(), expected)
        expected_scales = torch.full(scales[:, index].shape, torch.nan)
        assert_same(scales[:, index], expected_cache(expected_scales, row_scales, slots, 16))


@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=str)
def test_write_of_nothing(every_backend: AttentionBackend, slots: list[int]) -> None:
    kv_layer = make_kv_layer(Shape(2, 2, 16, 16), NUM_BLOCKS)
    rows = torch.randn(len(slots), 2, 16)
    every_backend.write_kv(rows, rows, kv_layer, metadata_with_slots(slots))
    assert kv_layer.key.isnan().all()
    assert kv_layer.value.isnan().all()
