"""Throughput against its definition: tokens by time with work, over the last ten seconds of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.throughput import WINDOW_SECONDS, Throughput


def test_nothing_is_known_before_the_first_step() -> None:
    throughput = Throughput()
    assert throughput.tokens_per_second is None
    assert throughput.seconds_for(100, 2) is None
    throughput.observe(10, 5.0)
    assert throughput.tokens_per_second is None, "how long the first step took is not known"


def test_a_first_step_counts_from_the_coming_of_its_work() -> None:
    throughput = Throughput()
    throughput.resume(2.0)
    throughput.observe(10, 2.5)
    assert throughput.tokens_per_second == 20


def test_idle_time_does_not_count() -> None:
    throughput = Throughput()
    throughput.resume(0.0)
    for now in (0.5, 1.0):
        throughput.observe(50, now)
    throughput.resume(1000.0)
    throughput.observe(50, 1000.5)
    assert throughput.tokens_per_second == 100


def test_only_the_last_seconds_count() -> None:
    throughput = Throughput()
    throughput.resume(0.0)
    for step in range(1, 1001):  # 100 seconds
        throughput.observe(1 if step <= 800 else 10, step / 10)
    assert throughput.tokens_per_second == pytest.approx(100)


def test_a_long_step_counts_whole() -> None:
    throughput = Throughput()
    throughput.resume(0.0)
    throughput.observe(600, 3 * WINDOW_SECONDS)
    assert throughput.tokens_per_second == 20
    throughput.observe(1, 3 * WINDOW_SECONDS + 1.0)
    assert throughput.tokens_per_second == pytest.approx(601 / 31), "less than the window is known beside it"


def test_a_clock_that_is_set_back_counts_no_negative_time() -> None:
    throughput = Throughput()
    throughput.resume(100.0)
    throughput.observe(10, 101.0)
    throughput.observe(10, 50.0)
    throughput.observe(10, 51.0)
    assert throughput.tokens_per_second == 15


def test_what_waits_takes_its_prompts_and_as_many_tokens_as_recent_answers_had() -> None:
    throughput = Throughput()
    throughput.resume(0.0)
    throughput.observe(200, 2.0)
    assert throughput.seconds_for(300) == 3
    assert throughput.seconds_for(300, 5) == 3, "no answer is complete yet"
    for length in (20, 60):
        throughput.observe_end(length)
    assert throughput.expected_output_tokens == 40
    assert throughput.seconds_for(300, 5) == 5
    for _ in range(256):
        throughput.observe_end(0)
    assert throughput.expected_output_tokens == 0, "only recent ones count"


def test_an_engine_that_gets_nothing_done_promises_nothing() -> None:
    throughput = Throughput()
    throughput.resume(0.0)
    throughput.observe(0, 1.0)
    assert throughput.tokens_per_second == 0
    assert throughput.seconds_for(1) is None


STEP_SECONDS = st.floats(0.001, 6.0)


@given(st.lists(st.tuples(STEP_SECONDS, st.booleans()), max_size=60), st.lists(STEP_SECONDS, min_size=1, max_size=60))
def test_steps_of_any_length_are_weighed_by_their_time(before: list[tuple[float, bool]], last: list[float]) -> None:
    """However a constant speed is cut into steps, it comes out; and so does a later one, once the window is full."""
    throughput = Throughput()
    now = 0.0
    throughput.resume(now)
    for seconds, is_idle_after in before:
        now += seconds
        throughput.observe(32 * seconds, now)
        assert throughput.tokens_per_second == pytest.approx(32)
        if is_idle_after:
            now += 100.0
            throughput.resume(now)
    counted = 0.0
    for seconds in last:
        now += seconds
        counted += seconds
        throughput.observe(256 * seconds, now)
    speed = throughput.tokens_per_second
    assert speed is not None and 32 - 1e-6 <= speed <= 256 + 1e-6
    if counted > WINDOW_SECONDS + 6.5 or not before:  # a whole step and a bucket may hang over
        assert speed == pytest.approx(256)
    elif counted < WINDOW_SECONDS - 1 and sum(seconds for seconds, _ in before) > 1:
        assert speed < 255, "the window reaches back before the last steps"
