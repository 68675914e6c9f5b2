"""The stopwatch of an engine's steps."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from server.step_clock import STEP_PARTS, STEP_TOKEN_BOUNDS, StepClock


def test_each_moment_of_work_belongs_to_one_part_and_rest_to_none():
    now = 0.0
    clock = StepClock(lambda: now)

    def work(part, seconds):
        nonlocal now
        now += seconds
        clock.ends(part)

    for _ in range(3):
        clock.begins_step()
        work("schedule", 1)
        work("execute", 10)
        work("update", 100)
        now += 1000  # until the next one begins
    clock.rests()
    now += 50_000
    clock.begins_step()
    work("schedule", 1)
    assert clock.seconds == {"schedule": 4, "execute": 30, "update": 300, "between": 2000}
    assert tuple(clock.seconds) == STEP_PARTS


@given(st.lists(st.integers(0, 40_000)))
def test_steps_are_counted_by_the_first_bound_that_holds_their_tokens(sizes):
    clock = StepClock()
    for size in sizes:
        clock.counts(size)
    steps = [size for size in sizes if size]
    assert clock.num_tokens == sum(steps)
    up_to = list(itertools.accumulate(clock.token_counts))
    assert up_to == [*(sum(size <= bound for size in steps) for bound in STEP_TOKEN_BOUNDS), len(steps)]
