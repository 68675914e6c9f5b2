"""The fused write of Triton under its interpreter: norm, rotation, quantisation and scatter against float64."""

from dataclasses import dataclass

import pytest
import torch

from kernels.attention.metadata import KVLayer, Rotation
from kernels.attention.rotation import rotate_heads
from kernels.attention.triton_write import launch_rotate_and_write, launch_write_kv
from kernels.kv_quant import QUANTISED_MAX, quantise
from tests.kernels.paged_batches import TOLERANCES, Shape, relative_error

NUM_BLOCKS = 4
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True, slots=True)
class Case:
    """The inputs of one write."""

    heads: torch.Tensor  # [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim]
    rotation: Rotation
    slot_mapping: torch.Tensor  # [num_tokens] int64

    def rotated(self, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values in float64."""
        return rotate_heads(self.heads.double(), self.rotation, num_kv_heads)


def make_case(shape: Shape, *, is_normed: bool, seed: int = 0) -> Case:
    """Heads as a slice of a wider product, NaN beside it; the last slot of the cache, padding tokens in between."""
    generator = torch.Generator().manual_seed(seed)
    num_heads = shape.num_q_heads + 2 * shape.num_kv_heads
    num_slots = NUM_BLOCKS * shape.block_size
    slots = [num_slots - 1, -1, *torch.randperm(num_slots - 1, generator=generator)[:2].tolist(), -1]
    packed = torch.full((len(slots), num_heads + 3, shape.head_dim), torch.nan, dtype=shape.dtype)
    heads = packed[:, :num_heads]
    heads.copy_(torch.randn(heads.shape, generator=generator) * 3)
    angles = torch.randn(len(slots), shape.head_dim // 2, generator=generator) * 30
    weight = torch.randn(shape.num_q_heads + shape.num_kv_heads, shape.head_dim, generator=generator)
    rotation = Rotation(angles.cos(), angles.sin(), weight if is_normed else None, 1e-5)
    return Case(heads, rotation, torch.tensor(slots))


def make_layer(shape: Shape, dtype: torch.dtype) -> KVLayer:
    """A layer as the KV cache lays it out, filled with what no write leaves: NaN, or -128."""
    size = (NUM_BLOCKS, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    fill = -128 if dtype == torch.int8 else torch.nan
    data = torch.full(size, fill, dtype=torch.float32).to(dtype)
    if dtype not in QUANTISED_MAX:
        return KVLayer(data[:, 0], data[:, 1])
    scales = torch.full(size[:-1], torch.nan)
    return KVLayer(data[:, 0], data[:, 1], scales[:, 0], scales[:, 1])


def written(cache: torch.Tensor, case: Case) -> torch.Tensor:
    """What the slots of the tokens that are not padding hold, [num_written, num_kv_heads, ...]."""
    slots = case.slot_mapping[case.slot_mapping >= 0]
    return cache[slots // cache.shape[2], :, slots % cache.shape[2]]


def assert_rest_untouched(cache: torch.Tensor, case: Case) -> None:
    slots = case.slot_mapping[case.slot_mapping >= 0]
    rest = cache.transpose(1, 2).flatten(0, 1).float()  # [num_slots, num_kv_heads, ...]
    is_rest = torch.ones(len(rest), dtype=torch.bool)
    is_rest[slots] = False
    assert ((rest[is_rest] == -128) | rest[is_rest].isnan()).all()


SHAPES = [
    Shape(32, 8, 128, 16),
    Shape(14, 2, 64, 32),  # seven query heads to each KV head
    Shape(9, 3, 80, 16),  # half a head is no power of two
    Shape(4, 4, 96, 64),
    Shape(8, 1, 256, 16),
    Shape(3, 1, 2, 3),
]


@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate_and_write(shape: Shape, dtype: torch.dtype, is_normed: bool) -> None:
    shape = Shape(shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, dtype)
    case = make_case(shape, is_normed=is_normed)
    layer = make_layer(shape, dtype)
    query = launch_rotate_and_write(case.heads, case.rotation, layer, case.slot_mapping)
    expected_query, expected_key, expected_value = case.rotated(shape.num_kv_heads)
    assert query.is_contiguous() and query.dtype == dtype
    assert relative_error(query, expected_query) < TOLERANCES[dtype]
    is_written = case.slot_mapping >= 0
    assert relative_error(written(layer.key, case), expected_key[is_written]) < TOLERANCES[dtype]
    assert torch.equal(written(layer.value, case).double(), expected_value[is_written])
    assert_rest_untouched(layer.key, case)
    assert_rest_untouched(layer.value, case)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", QUANTISED_MAX, ids=str)
def test_a_quantised_write_is_the_quantised_plain_write(
    shape: Shape, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """Bit for bit: keys are quantised from what a cache of the model's dtype would hold."""
    shape = Shape(shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, dtype)
    # On a card the order of a norm's sum is the compiler's, and differs between the two kernels: in float32 it shows.
    case = make_case(shape, is_normed=dtype != torch.float32)
    plain, quantised = make_layer(shape, dtype), make_layer(shape, cache_dtype)
    expected_query = launch_rotate_and_write(case.heads, case.rotation, plain, case.slot_mapping)
    query = launch_rotate_and_write(case.heads, case.rotation, quantised, case.slot_mapping)
    assert torch.equal(query, expected_query)
    assert quantised.key_scale is not None and quantised.value_scale is not None
    for rows, values, scales in (
        (plain.key, quantised.key, quantised.key_scale),
        (plain.value, quantised.value, quantised.value_scale),
    ):
        expected_values, expected_scales = quantise(written(rows, case), cache_dtype)
        assert torch.equal(written(values, case).float(), expected_values.float())
        assert torch.equal(written(scales, case), expected_scales)
        assert_rest_untouched(values, case)
        assert_rest_untouched(scales, case)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, *QUANTISED_MAX], ids=str)
def test_write_without_rotation(shape: Shape, cache_dtype: torch.dtype) -> None:
    case = make_case(Shape(0, shape.num_kv_heads, shape.head_dim, shape.block_size, torch.bfloat16), is_normed=False)
    key, value = case.heads.split(shape.num_kv_heads, dim=1)
    layer = make_layer(shape, cache_dtype)
    launch_write_kv(key, value, layer, case.slot_mapping)
    is_written = case.slot_mapping >= 0
    for cache, scales, rows in ((layer.key, layer.key_scale, key), (layer.value, layer.value_scale, value)):
        if scales is None:
            assert torch.equal(written(cache, case), rows[is_written])
        else:
            expected_values, expected_scales = quantise(rows[is_written], cache_dtype)
            assert torch.equal(written(cache, case).float(), expected_values.float())
            assert torch.equal(written(scales, case), expected_scales)
        assert_rest_untouched(cache, case)


def test_a_head_of_zeros_and_a_head_of_the_largest_numbers() -> None:
    shape = Shape(2, 2, 64, 16)
    key = torch.zeros(2, 2, 64)
    key[1] = torch.tensor([3e38, 1e-30]).repeat(32)
    layer = make_layer(shape, torch.int8)
    launch_write_kv(key, key, layer, torch.tensor([0, 1]))
    values, scales = quantise(key, torch.int8)
    assert not values[0].any() and values[1].abs().max() == 127
    assert torch.equal(layer.key[0, :, :2].transpose(0, 1), values)
    assert layer.key_scale is not None and torch.equal(layer.key_scale[0, :, :2].T, scales)


def test_a_slot_beyond_two_to_the_31() -> None:
    """Block times stride passes 32 bits in a cache of some gigabytes. The memory between is never touched."""
    shape = Shape(2, 1, 64, 16, torch.float16)
    block_stride = 2**30
    data = torch.empty(4 * block_stride, dtype=torch.float16)
    cache = data.as_strided((4, 1, 16, 64), (block_stride, 16 * 64, 64, 1))
    case = make_case(shape, is_normed=False)
    layer = KVLayer(cache, data.as_strided(cache.shape, cache.stride(), 2**20))
    launch_rotate_and_write(case.heads, case.rotation, layer, case.slot_mapping)
    expected = case.heads[case.slot_mapping >= 0, -1:]
    assert case.slot_mapping.max() // 16 == 3 and torch.equal(written(layer.value, case), expected)


@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=str)
def test_nothing_to_write_still_gives_queries(slots: list[int]) -> None:
    shape = Shape(4, 2, 64, 16)
    case = make_case(shape, is_normed=True)
    layer = make_layer(shape, torch.float32)
    expected = case.rotated(2)[0][: len(slots)]
    rotation = Rotation(
        case.rotation.cos[: len(slots)], case.rotation.sin[: len(slots)], case.rotation.norm_weight, 1e-5
    )
    query = launch_rotate_and_write(case.heads[: len(slots)], rotation, layer, torch.tensor(slots, dtype=torch.int64))
    torch.testing.assert_close(query.double(), expected, rtol=1e-5, atol=1e-5)
    assert layer.key.isnan().all() and layer.value.isnan().all()
