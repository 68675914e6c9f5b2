"""The search for the highest rate, on servers that are functions: ends where the oracle says, in few trials."""

import random
from statistics import fmean, median

import pytest

from server.load_test.search import MAX_TRIALS, Trial, find_rate


def server(capacity):
    async def attempt(rate):
        return Trial(rate, rate <= capacity, 1.0 if rate <= capacity else 0.5)

    return attempt


@pytest.mark.parametrize("capacity", [0.02, 0.9, 1.0, 3.7, 64.0, 999.0])
@pytest.mark.parametrize("precision", [0.02, 0.1, 0.5])
async def test_the_highest_rate_is_found_as_precisely_as_asked(capacity, precision):
    found = await find_rate(server(capacity), start=1.0, least=0.01, most=1e4, precision=precision)
    assert found.is_complete and found.rate <= capacity < found.broken_rate
    assert found.broken_rate / found.rate <= 1 + precision
    assert sum(trial.rate == found.rate for trial in found.trials) == 2  # the second confirms
    assert len(found.trials) <= 20


async def test_a_server_that_keeps_every_rate():
    found = await find_rate(server(1e9), start=1.0, least=0.01, most=100.0, precision=0.1)
    assert (found.rate, found.broken_rate, found.is_complete) == (100.0, None, True)


async def test_a_server_that_keeps_none():
    found = await find_rate(server(0.0), start=1.0, least=0.1, most=100.0, precision=0.1)
    assert (found.rate, found.is_complete) == (None, False) and found.broken_rate == 0.1


@pytest.mark.parametrize("seed", range(20))
async def test_chance_does_not_lead_it_far_astray(seed):
    chance = random.Random(seed)

    async def attempt(rate):  # keeps its objective less and less likely around 10
        is_kept = chance.random() < 1 / (1 + (rate / 10) ** 12)
        return Trial(rate, is_kept, 1.0 if is_kept else 0.0)

    found = await find_rate(attempt, start=1.0, least=0.01, most=1e4, precision=0.1)
    assert found.rate is not None and 4 < found.rate < 14
    assert len(found.trials) < MAX_TRIALS
    for rate, is_kept in ((found.rate, True), (found.broken_rate, False)):
        assert sum(trial.is_kept == is_kept for trial in found.trials if trial.rate == rate) == 2


def share_in_time(rate, seconds, chance):
    """Of one trial of a queue with one server that takes 20 ms for each: the share answered within 100 ms."""
    now = free = num_in_time = num = 0
    while (now := now + chance.expovariate(rate)) < seconds:
        free = max(free, now) + 0.02
        num, num_in_time = num + 1, num_in_time + (free - now <= 0.1)
    return num_in_time / max(1, num)


async def test_what_it_finds_of_a_queue_is_what_trying_all_rates_finds():
    """Poisson arrivals at a server of fixed time (M/D/1), in trials so short that any one is often wrong."""
    long = random.Random(0)
    best = max(rate for rate in range(30, 50) if share_in_time(rate, 3000, long) >= 0.9)

    async def attempt(rate):
        share = share_in_time(rate, 10, chance)
        return Trial(rate, share >= 0.9, share)

    found = []
    for seed in range(60):
        chance = random.Random(seed)
        found.append(await find_rate(attempt, start=1.0, least=1.0, most=1e4, precision=0.1))
    rates = [each.rate for each in found]
    assert 36 <= best <= 39 and median(rates) == pytest.approx(best, rel=0.1)
    assert all(0.75 * best < rate < 1.2 * best for rate in rates)
    assert fmean(len(each.trials) for each in found) < 16


async def test_one_unlucky_trial_does_not_end_it_low():
    trials = []

    async def attempt(rate):
        trials.append(rate)
        is_kept = rate < 100 and len(trials) != 2
        return Trial(rate, is_kept, float(is_kept))

    found = await find_rate(attempt, start=1.0, least=0.01, most=1e4, precision=0.1)
    assert trials[:2] == [1, 2] and 90 < found.rate < 100 and found.is_complete


async def test_a_search_that_is_ended_says_what_it_knows():
    trials = iter([Trial(1.0, True, 1.0), Trial(2.0, True, 1.0), Trial(4.0, False, 0.0), None])

    async def attempt(rate):
        return next(trials)

    found = await find_rate(attempt, start=1.0, least=0.01, most=1e4, precision=0.1)
    assert (found.rate, found.broken_rate, found.is_complete) == (2.0, 4.0, False) and len(found.trials) == 3


async def test_a_server_of_pure_chance_ends_the_search_all_the_same():
    chance = random.Random(1)

    async def attempt(rate):
        return Trial(rate, chance.random() < 0.5, 0.5)

    found = await find_rate(attempt, start=1.0, least=0.01, most=1e4, precision=0.01)
    assert len(found.trials) <= MAX_TRIALS
