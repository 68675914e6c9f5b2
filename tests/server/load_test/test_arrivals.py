"""Properties of the arrival processes and of drawn lengths, against what probability theory says of them."""

import random
from itertools import islice, pairwise
from math import exp, sqrt
from statistics import fmean, median, pstdev

import pytest

from server.load_test.arrivals import arrivals, within
from server.load_test.lengths import BadLengths, read_lengths

NUM_DRAWN = 40_000


def gaps(process, rate, burstiness=1.0, seed=1):
    times = list(islice(arrivals(process, rate, random.Random(seed), burstiness), NUM_DRAWN))
    assert times == sorted(times)
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


@pytest.mark.parametrize(
    ("process", "burstiness", "variation"),
    [("poisson", 1.0, 1.0), ("gamma", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)],
)
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(process, burstiness, variation):
    drawn = gaps(process, 5.0, burstiness)
    assert fmean(drawn) == pytest.approx(1 / 5, rel=0.04)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(variation, rel=0.04)


def test_poisson_arrivals_forget_what_was_before():
    drawn = gaps("poisson", 2.0)
    # Exponential gaps: a share exp(-x) exceeds x mean gaps, and as large a share of the rest exceeds x more.
    for least in (0.5, 1.0, 2.0):
        assert sum(gap > least / 2.0 for gap in drawn) / NUM_DRAWN == pytest.approx(exp(-least), abs=0.01)
    mean = fmean(drawn)
    products = fmean((one - mean) * (next_one - mean) for one, next_one in pairwise(drawn))
    assert abs(products) / mean**2 < 4 / sqrt(NUM_DRAWN)
    # As many arrivals a second as their variance: what tells Poisson from all that is burstier or smoother.
    times, counts = 0.0, [0] * 10_000
    for gap in drawn:
        times += gap
        if times < len(counts):
            counts[int(times)] += 1
    assert pstdev(counts) ** 2 / fmean(counts) == pytest.approx(1.0, rel=0.08)


def test_constant_arrivals_begin_at_once_and_never_drift():
    times = list(islice(arrivals("constant", 3.0, random.Random(0)), 3_000_001))
    assert times[:2] == [0.0, 1 / 3] and times[-1] == 1_000_000.0


def test_arrivals_are_the_same_for_the_same_seed_alone():
    assert gaps("gamma", 1.0, 0.5, seed=3) == gaps("gamma", 1.0, 0.5, seed=3) != gaps("gamma", 1.0, 0.5, seed=4)


def test_arrivals_within_a_time():
    assert list(within(arrivals("constant", 2.0, random.Random(0)), 1.5)) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("text", "middle"),
    [
        ("128", 128),
        ("64-256", 160),
        ("normal:100,10", 100),
        ("lognormal:200,0.8", 200),
        ("exponential:100", 69),
    ],
)
def test_lengths_have_the_median_that_was_asked_for(text, middle):
    lengths = read_lengths(text)
    chance = random.Random(5)
    drawn = [lengths.draw(chance) for _ in range(20_000)]
    assert median(drawn) == pytest.approx(middle, rel=0.04)
    assert min(drawn) >= 1 and all(isinstance(length, int) for length in drawn)


@pytest.mark.parametrize("text", ["", "x", "0", "9-3", "-5", "normal:1", "normal:nan,1", "zipf:3", "lognormal:-1,1"])
def test_what_describes_no_lengths_is_refused(text):
    with pytest.raises(BadLengths):
        read_lengths(text)
