"""The repaired interpreter against torch, bit for bit: casts over every bfloat16, arithmetic, products, loop bounds."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

EVERY_BFLOAT16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FLOAT8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def cast_kernel(source, target, SIZE: tl.constexpr):  # noqa: N803
    # grid: (1,)
    index = tl.arange(0, SIZE)
    tl.store(target + index, tl.load(source + index).to(target.dtype.element_ty))


@triton.jit
def arithmetic_kernel(a, b, out, SIZE: tl.constexpr):  # noqa: N803
    # grid: (1,)
    index = tl.arange(0, SIZE)
    x = tl.load(a + index)
    y = tl.load(b + index)
    tl.store(out + index, x + y)
    tl.store(out + SIZE + index, x - y)
    tl.store(out + 2 * SIZE + index, x * y)
    tl.store(out + 3 * SIZE + index, x * 2.5)
    tl.store(out + 4 * SIZE + index, -x)
    tl.store(out + 5 * SIZE + index, tl.abs(x))
    tl.store(out + 6 * SIZE + index, tl.maximum(x, y))
    tl.store(out + 7 * SIZE + index, tl.where(x < y, x, y))


@triton.jit
def sums_kernel(a, sums, largest, SIZE: tl.constexpr):  # noqa: N803
    # grid: (1,)
    x = tl.load(a + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    tl.store(sums + tl.arange(0, SIZE), tl.sum(x, 1))
    tl.store(sums + SIZE, tl.sum(tl.sum(x, 1), 0))
    tl.store(largest + tl.arange(0, SIZE), tl.max(x, 1))


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr):  # noqa: N803
    # grid: (1,)
    index = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + index, tl.dot(tl.load(a + index), tl.load(b + index), input_precision="ieee"))


@triton.jit
def loop_kernel(bounds, out):
    # grid: (1,)
    total = 0
    for i in range(tl.load(bounds), tl.load(bounds + 1)):
        total += i
    for i in tl.range(tl.load(bounds), tl.load(bounds + 1), 2):
        total += 1000 * i
    tl.store(out, total)


def cast(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast by a kernel, padded to the power of two that it needs."""
    padded = source.new_zeros(triton.next_power_of_2(len(source)))
    padded[: len(source)] = source
    target = torch.empty(len(padded), dtype=dtype)
    cast_kernel[(1,)](padded, target, SIZE=len(padded))
    return target[: len(source)]


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits; any NaN equals any other."""
    both_nan = actual.float().isnan() & expected.float().isnan()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    assert bool(((actual.view(bits) == expected.view(bits)) | both_nan).all())


def random_float32() -> torch.Tensor:
    """Any bits at all, then magnitudes around each cast's edges, and values half-way between two of the target's."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(1 << 31), 1 << 31, (1 << 15,), generator=generator).to(torch.int32).view(torch.float32)
    scaled = torch.randn(1 << 14, generator=generator) * 2.0 ** torch.randint(-20, 20, (1 << 14,), generator=generator)
    half_way = (EVERY_BFLOAT16[1:].float().double() + EVERY_BFLOAT16[:-1].float().double()).float() / 2
    edges = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0, 464.0, 500.0, 1e6, 57344.0, 61440.0, 1e-9]
    )
    return torch.cat((any_bits, scaled, half_way, edges))


def test_every_bfloat16_widens_exactly() -> None:
    assert_same_bits(cast(EVERY_BFLOAT16, torch.float32), EVERY_BFLOAT16.float())


def test_float32_rounds_to_the_nearest_bfloat16() -> None:
    values = random_float32()
    assert_same_bits(cast(values, torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("source", [torch.float16, torch.int32], ids=str)
def test_other_types_round_to_bfloat16(source: torch.dtype) -> None:
    values = (random_float32().nan_to_num(0.0).clamp(-60000, 60000)).to(source)
    assert_same_bits(cast(values, torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("target", [torch.float16, torch.int32], ids=str)
def test_bfloat16_casts_to_other_types(target: torch.dtype) -> None:
    values = EVERY_BFLOAT16[EVERY_BFLOAT16.float().abs() < 60000]
    assert_same_bits(cast(values, target), values.to(target))


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_casts_to_eight_bits_round_and_saturate(source: torch.dtype, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = random_float32().to(source)
    expected = values.float().clamp(-largest, largest).to(dtype)  # torch's own cast does not saturate
    assert_same_bits(cast(values, dtype), expected)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_eight_bit_float_widens_exactly(dtype: torch.dtype, target: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    assert_same_bits(cast(values, target), values.float().to(target))


def test_bfloat16_arithmetic_rounds_each_result() -> None:
    x, y = torch.randn(2, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty(8, 1024, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, SIZE=1024)
    expected = [x + y, x - y, x * y, x * 2.5, -x, x.abs(), torch.maximum(x, y), torch.minimum(x, y)]
    for actual, wanted in zip(out, expected, strict=True):
        assert_same_bits(actual, wanted)


def test_bfloat16_reductions() -> None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    sums, largest = torch.empty(33), torch.empty(32)
    sums_kernel[(1,)](x, sums, largest, SIZE=32)
    torch.testing.assert_close(sums[:32], x.float().sum(1), rtol=2**-8, atol=0)
    torch.testing.assert_close(sums[32], sums[:32].sum(), rtol=2**-8, atol=0)
    assert torch.equal(largest, x.float().amax(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FLOAT8_DTYPES], ids=str)
def test_products_add_up_in_float32(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, SIZE=32)
    np.testing.assert_allclose(out, a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_loop_bounds_may_be_tensors() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    loop_kernel[(1,)](torch.tensor([3, 8]), out)
    assert out.item() == sum(range(3, 8)) + 1000 * sum(range(3, 8, 2))
