"""The arithmetic of the KV cache benchmark, on costs whose growth is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kv_cache_cost import BLOCK_SIZE, curve, doubling_lengths, growth_exponent, total_seconds

LENGTHS = [64, 128, 256, 512, 1024, 2048]


@given(st.floats(-1, 3), st.floats(1e-6, 1e3))
def test_growth_exponent_of_a_power_is_its_power(exponent, factor):
    assert growth_exponent(LENGTHS, [factor * n**exponent for n in LENGTHS]) == pytest.approx(exponent, abs=1e-6)


@given(st.floats(1e-3, 10), st.floats(0, 1e-2))
def test_total_of_a_straight_line_is_exact(constant, slope):
    totals = total_seconds(LENGTHS, [constant + slope * n for n in LENGTHS])
    assert totals == pytest.approx([constant * n + slope * n**2 / 2 for n in LENGTHS])


def test_total_never_starts_below_zero():
    # the line through the first two points would cross zero before it reaches length 0
    assert total_seconds([10, 20], [1.0, 5.0]) == (5.0, 35.0)


def test_constant_cost_makes_a_linear_total_and_linear_cost_a_quadratic_one():
    constant = curve({n: [0.04] for n in LENGTHS})
    linear = curve({n: [0.001 * n] for n in LENGTHS})
    assert (constant.token_exponent, constant.total_exponent) == pytest.approx((0, 1), abs=1e-9)
    assert (linear.token_exponent, linear.total_exponent) == pytest.approx((1, 2), abs=1e-9)


def test_curve_goes_through_the_medians():
    costs = curve({64: [9.0, 1.0, 2.0], 128: [3.0, 4.0]}).costs
    assert [(c.length, c.median, c.least, c.most, c.num_samples) for c in costs] == [
        (64, 2.0, 1.0, 9.0, 3),
        (128, 3.5, 3.0, 4.0, 2),
    ]


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [(8128, [64, 128, 256, 512, 1024, 2048, 4096, 8128]), (300, [64, 128, 256, 288]), (256, [64, 128, 256])],
)
def test_lengths_double_and_are_whole_blocks(longest, lengths):
    assert doubling_lengths(longest) == lengths
    assert all(length % BLOCK_SIZE == 0 for length in lengths)
