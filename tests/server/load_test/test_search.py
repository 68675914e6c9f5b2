"""The search for the highest rate, on servers that are functions: ends where the oracle says, in few trials."""

import random

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
    assert all(trial.is_kept for trial in found.trials if trial.rate == found.rate)


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
