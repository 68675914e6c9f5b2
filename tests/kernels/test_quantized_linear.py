"""Products with quantised weights: right on every instruction set, and bitwise the same in any company."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.native_library import INSTRUCTION_SETS, load_library, supported_instruction_sets
from kernels.model_ops.native_ops import NativeOps
from kernels.quantized_weight import CODE_CENTRE, GROUP_SIZE, QuantizedWeight, pack, quantize

# Rows around the tiles of 6 and the tasks of 96; outputs around panels of 16 and pairs of them.
row_counts = st.sampled_from([1, 2, 5, 6, 7, 12, 13, 95, 97, 200])
output_counts = st.sampled_from([1, 15, 16, 17, 32, 49, 130, 300])
group_counts = st.sampled_from([1, 2, 3, 18, 48])
instruction_sets = st.sampled_from(list(INSTRUCTION_SETS))
formats = st.sampled_from(["4 bits", "8 bits", "8 bits by output"])
seeds = st.integers(0, 2**32)


pytestmark = pytest.mark.usefixtures("native_library", "restored_threads")


def available(instruction_set: str) -> NativeOps:
    supported = supported_instruction_sets(load_library())
    return NativeOps(instruction_set if instruction_set in supported else "generic")


def random_codes(
    generator: torch.Generator, num_outputs: int, num_groups: int, form: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes of the whole range, the largest products among them, and scales and minimums of either sign."""
    shape, places = (num_outputs, num_groups * GROUP_SIZE), (num_outputs, num_groups)
    lowest, end = (0, 16) if form == "4 bits" else (1, 256)
    codes = torch.randint(lowest, end, shape, generator=generator, dtype=torch.uint8)
    extreme = torch.rand(places, generator=generator).repeat_interleave(GROUP_SIZE, 1) < 0.2
    codes[extreme] = end - 1
    scales = torch.randn(places, generator=generator).half()
    if form == "8 bits by output":
        scales = scales[:, :1].contiguous()
    return codes, scales, torch.randn(places, generator=generator).half() if form == "4 bits" else None


def by_input(of_groups: torch.Tensor, in_features: int) -> torch.Tensor:
    """Scales or minimums, of each input."""
    return of_groups.double().repeat_interleave(in_features // of_groups.shape[1], 1)


def values(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> torch.Tensor:
    """What a weight means, in float64."""
    of_group = by_input(scales, codes.shape[1])
    if minimums is None:
        return (codes.double() - CODE_CENTRE) * of_group
    return codes.double() * of_group + by_input(minimums, codes.shape[1])


def exact_inputs(generator: torch.Generator, num_rows: int, num_groups: int) -> torch.Tensor:
    """Inputs that int8 groups hold exactly: whole numbers up to 127, which every group has, times a power of two."""
    shape = (num_rows, num_groups, GROUP_SIZE)
    whole = torch.randint(-127, 128, shape, generator=generator)
    whole[..., 5] = torch.where(torch.rand(shape[:2], generator=generator) < 0.5, -127, 127)
    whole[torch.rand(shape[:2], generator=generator) < 0.1] = 0  # a group of zeros has no scale
    exponents = torch.randint(-20, 8, (num_rows, num_groups, 1), generator=generator)
    return (whole.double() * 2.0**exponents).float().flatten(1)


@settings(deadline=None, max_examples=80)
@given(row_counts, output_counts, group_counts, formats, st.booleans(), instruction_sets, seeds)
def test_product(
    num_rows: int, num_outputs: int, num_groups: int, form: str, has_bias: bool, instruction_set: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes, scales, minimums = random_codes(generator, num_outputs, num_groups, form)
    inputs = exact_inputs(generator, num_rows, num_groups)
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    weight = pack(codes, scales, minimums)
    assert weight.bits == int(form[0]) and torch.equal(
        weight.dequantize().double(), values(codes, scales, minimums).float()
    )
    out = available(instruction_set).linear(inputs, weight, bias)
    # The sum that would come out were no term to cancel another: what rounding errors are relative to.
    size = inputs.double().abs() @ (codes.double() * by_input(scales.abs(), codes.shape[1])).T
    if minimums is not None:
        size += inputs.double().abs() @ by_input(minimums.abs(), codes.shape[1]).T
    expected = inputs.double() @ values(codes, scales, minimums).T + (0 if bias is None else bias.double())
    assert ((out.double() - expected).abs() <= 1e-6 * (size + expected.abs())).all()


@settings(deadline=None, max_examples=40)
@given(row_counts, output_counts, group_counts, formats, instruction_sets, seeds)
def test_inputs_are_rounded_to_the_nearest_step(
    num_rows: int, num_outputs: int, num_groups: int, form: str, instruction_set: str, seed: int
) -> None:
    """An input is off by half a step at most, of 127 steps from zero to the largest of its group."""
    generator = torch.Generator().manual_seed(seed)
    weight = pack(*random_codes(generator, num_outputs, num_groups, form))
    inputs = torch.randn(num_rows, num_groups * GROUP_SIZE, generator=generator)
    half_steps = inputs.double().unflatten(1, (num_groups, GROUP_SIZE)).abs().amax(-1) / 127 / 2
    out = available(instruction_set).linear(inputs, weight, None)
    exact = inputs.double() @ weight.dequantize().double().T
    bound = half_steps.repeat_interleave(GROUP_SIZE, 1) @ weight.dequantize().double().abs().T
    assert ((out.double() - exact).abs() <= 1.001 * bound + 1e-4).all()


@settings(deadline=None, max_examples=40)
@given(row_counts, output_counts, group_counts, formats, instruction_sets, seeds)
def test_rows_do_not_depend_on_company(
    num_rows: int, num_outputs: int, num_groups: int, form: str, instruction_set: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = pack(*random_codes(generator, num_outputs, num_groups, form))
    inputs = torch.randn(num_rows, num_groups * GROUP_SIZE, generator=generator)
    ops = available(instruction_set)
    torch.set_num_threads(3)
    together = ops.linear(inputs, weight, None)
    torch.set_num_threads(1)
    cut = seed % num_rows
    for rows in (slice(cut, cut + 1), slice(0, cut), slice(cut, num_rows)):
        assert torch.equal(ops.linear(inputs[rows], weight, None), together[rows])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("form", ["4 bits", "8 bits", "8 bits by output"])
def test_embed(form: str, instruction_set: str) -> None:
    weight = pack(*random_codes(torch.Generator().manual_seed(3), 50, 3, form))
    ids = torch.tensor([3, 49, 0, 3])
    rows = available(instruction_set).embed(ids, weight)
    assert torch.equal(rows, weight.dequantize()[ids])
    assert torch.equal(available(instruction_set).embed(ids, weight, 2.0), 2.0 * rows)


@pytest.mark.parametrize("ids", [[50], [-1], [0, 1 << 40]])
def test_an_id_outside_the_table_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="outside"):
        NativeOps().embed(torch.tensor(ids), quantize(torch.randn(50, 32)))


def test_rows_that_do_not_follow_one_another() -> None:
    wide, weight = torch.randn(9, 100), quantize(torch.randn(33, 64))
    expected = NativeOps().linear(wide[:, 5:69].contiguous(), weight, None)
    assert torch.equal(NativeOps().linear(wide[:, 5:69], weight, None), expected)


def test_no_rows() -> None:
    weight = quantize(torch.randn(33, 64))
    with ThreadPoolExecutor(1) as fresh_thread:  # its first product
        assert fresh_thread.submit(NativeOps().linear, torch.empty(0, 64), weight, None).result().shape == (0, 33)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_input_is_not_hidden(number: float, instruction_set: str) -> None:
    """Wherever in its group it is, it reaches every output of its row, and no other row."""
    ops, codes, scales = available(instruction_set), torch.randint(1, 16, (33, 64)).byte(), torch.rand(33, 2) + 0.1
    for weight in (pack(codes, scales, -scales), pack(codes, scales, None)):
        for place in range(GROUP_SIZE, 2 * GROUP_SIZE):
            inputs = torch.randn(3, 64)
            inputs[1, place] = number
            assert ops.linear(inputs, weight, None).isfinite().all(1).tolist() == [True, False, True]
            assert not ops.linear(inputs[1:2], weight, None).isfinite().any()


def test_rounding_a_weight() -> None:
    """Half a step at most, and nothing at all where the weight is of that form already."""
    weight = torch.randn(37, 96) * torch.logspace(-3, 2, 37)[:, None]
    weight[5] = 0
    rounded = quantize(weight).dequantize()
    step = weight.unflatten(1, (-1, GROUP_SIZE)).abs().amax(-1) / 127
    assert ((rounded - weight).abs() <= 0.51 * step.repeat_interleave(GROUP_SIZE, 1)).all()
    again = quantize(rounded)
    assert torch.equal(again.dequantize(), rounded) and isinstance(again, QuantizedWeight)
    by_output = quantize(weight, by_output=True)
    assert by_output.scales.shape[1] == 1 < again.scales.shape[1]
    steps = weight.abs().amax(-1, keepdim=True) / 127
    assert ((by_output.dequantize() - weight).abs() <= 0.51 * steps).all()


def test_rounding_a_tiny_weight() -> None:
    """Float16 has few bits for such scales, or none: a step more is lost at most, not the weight."""
    weight = torch.randn(37, 96) * torch.logspace(-9, -3, 37)[:, None]
    step = weight.unflatten(1, (-1, GROUP_SIZE)).abs().amax(-1) / 127 + 2.0**-24
    assert ((quantize(weight).dequantize() - weight).abs() <= 0.51 * step.repeat_interleave(GROUP_SIZE, 1)).all()
