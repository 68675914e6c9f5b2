"""Replays: latencies that can be reckoned by hand, hit rates that follow from the trace, and books that balance."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.simulate.measurements import distribution
from scheduler.simulate.prompts import prompt_token_ids
from scheduler.simulate.replay import Replay
from scheduler.simulate.routers import build_router
from scheduler.simulate.step_cost import NoCost
from scheduler.simulate.trace_files import read_trace
from scheduler.simulate.traces import Session, Trace, Turn
from tests.scheduler.simulated import deployment, simulate, trace_of, unlimited
from tests.scheduler.test_simulate_traces import CODING_ASSISTANT, MOONCAKE


def token_hit_rate(trace, block_size):
    """What an unlimited cache finds, told from the prompts' tokens alone: no ids of runs, no hashes of ours."""
    seen = set()
    num_hit = num_tokens = 0
    for serial, turn in enumerate(trace.turns()):
        token_ids = prompt_token_ids(turn, trace.tokens_per_run, serial)
        prefixes = [token_ids[:end].tobytes() for end in range(block_size, len(token_ids) + 1, block_size)]
        found = next((n for n, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
        num_hit += min(found, (len(token_ids) - 1) // block_size) * block_size
        num_tokens += len(token_ids)
        seen.update(prefixes)
    return num_hit / num_tokens


@pytest.mark.parametrize(
    ("path", "tokens_per_run", "block_size"), [(MOONCAKE, 16, 8), (MOONCAKE, 16, 32), (CODING_ASSISTANT, 8, 4)]
)
def test_an_unlimited_cache_finds_what_the_trace_repeats(path, tokens_per_run, block_size):
    # The answers' lengths make no difference, and their steps take most of the time.
    trace = read_trace(path).scaled(tokens_per_run, output_scale=1e-6)
    report = simulate(trace, unlimited(trace, block_size))
    assert report.hit_rate == token_hit_rate(trace, block_size)
    assert report.hit_rate > 0.2
    if tokens_per_run % block_size == 0:  # else a block is cached only with the beginning of the next run
        assert report.hit_rate == report.hit_rate_limit
    assert (report.num_answered, report.num_evicted_blocks) == (trace.num_requests, 0)


def test_requests_of_one_moment_are_answered_one_by_one_where_steps_take_no_time():
    trace = Trace("test", tuple(Session(1.0, (Turn(9, 3, [5, 6]),)) for _ in range(5)), tokens_per_run=4)
    report = simulate(trace, unlimited(trace, 4))
    assert report.hit_rate == report.hit_rate_limit == 4 * 8 / 45
    assert report.num_steps == 5 * 3


def test_without_a_cache_nothing_is_found():
    trace = read_trace(MOONCAKE).scaled(4, output_scale=1e-6).first(40)
    report = simulate(trace, deployment(4096, cost=NoCost(), enable_prefix_caching=False))
    assert (report.hit_rate, report.num_answered) == (0.0, 40)


def test_one_request_alone_takes_a_step_for_each_token():
    report = simulate(trace_of((2.0, 10, 3)), deployment())
    assert (report.ttft.mean, report.inter_token.mean, report.end_to_end.mean) == (1.0, 1.0, 3.0)
    assert report.inter_token.num_samples == 2
    assert (report.seconds, report.queue.most, report.utilization) == (5.0, 0.0, 0.6)
    # Steps hold 10, 11 and 12 tokens in 3 blocks of 4.
    assert report.waste == pytest.approx(1 - 33 / 36)
    assert report.kv_usage == pytest.approx(3 / 256)


def test_a_newcomer_waits_for_the_step_that_runs_and_for_the_one_behind_it():
    trace = trace_of((0.0, 10, 9), (0.5, 10, 1))
    step_by_step = simulate(trace, deployment(num_steps_ahead=0))
    assert step_by_step.ttft.most == 1.5  # joins at 1, done at 2
    ahead = simulate(trace, deployment(num_steps_ahead=1))
    assert ahead.ttft.most == 2.5  # at 1 the step that begins then is scheduled already
    assert ahead.end_to_end.most == step_by_step.end_to_end.most == 9.0


def test_a_prompt_longer_than_a_step_takes_several():
    report = simulate(trace_of((0.0, 130, 1)), deployment())
    assert (report.ttft.mean, report.num_steps) == (3.0, 3)


def test_a_turn_follows_the_answer_and_the_thinking():
    trace = Trace("talk", (Session(1.0, (Turn(4, 2), Turn(8, 1, think_time=5.0), Turn(8, 1, think_time=0.0))),))
    report = simulate(trace, deployment())
    assert report.num_answered == 3
    assert report.seconds == 1.0 + 2 + 5 + 1 + 0 + 1


def test_a_pool_too_small_for_all_preempts_and_still_answers():
    trace = trace_of(*((0.0, 20, 40) for _ in range(8)))
    report = simulate(trace, deployment(num_blocks=40))
    assert report.num_preemptions > 0
    assert report.num_recomputed_tokens > 0
    assert (report.num_answered, report.num_generated_tokens) == (8, 320)


def test_a_full_queue_and_a_short_patience_drop_requests():
    trace = trace_of(*((0.0, 20, 40) for _ in range(30)))
    bounded = simulate(trace, deployment(max_queued_requests=5))
    assert bounded.num_dropped == {"queue_full": 30 - bounded.num_answered}
    assert 8 <= bounded.num_answered < 30
    impatient = simulate(trace, deployment(queue_timeout=20.0))
    assert impatient.num_dropped["queue_timeout"] == 30 - impatient.num_answered > 0
    assert impatient.queue.most <= 20


def test_the_turns_after_a_refused_one_are_never_sent():
    trace = Trace("talk", (Session(0.0, (Turn(4, 1), Turn(5000, 1), Turn(4, 1), Turn(4, 1))),))
    report = simulate(trace, deployment(num_blocks=16))
    assert (report.num_answered, report.num_refused, report.num_unsent) == (1, 1, 2)


@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "prefix-aware"])
def test_replicas_share_the_work(router):
    trace = trace_of(*((0.0, 20, 10) for _ in range(32)))
    alone = simulate(trace, deployment())
    four = simulate(trace, deployment(num_replicas=4, router=router))
    assert four.num_answered == 32
    assert four.seconds < alone.seconds / 3
    assert four.num_cards == 4


def test_a_router_that_knows_prefixes_finds_more_of_them():
    trace = read_trace(MOONCAKE).scaled(8, output_scale=0.01)
    rates = {
        router: simulate(
            trace, deployment(4096, cost=NoCost(), num_replicas=4, router=router, max_num_batched_tokens=2048)
        ).hit_rate
        for router in ("round-robin", "prefix-aware")
    }
    assert rates["prefix-aware"] > 1.5 * rates["round-robin"]


def test_a_prefix_is_followed_until_its_replica_has_far_more_to_do():
    router = build_router("prefix-aware", 3)
    assert router.choose(Turn(8, 1, [1, 2]), [9, 4, 5]) == 1
    assert router.choose(Turn(8, 1, [3, 4]), [0, 4, 1]) == 0
    assert router.choose(Turn(8, 1, [1, 9]), [4, 8, 4]) == 1
    assert router.choose(Turn(8, 1, [1, 2, 7]), [4, 11, 5]) == 0
    assert router.choose(Turn(8, 1, [1, 2, 8]), [5, 4, 5]) == 1  # both know two runs of it
    assert router.choose(Turn(8, 1, [1, 2, 7]), [9, 8, 8]) == 0  # one knows three


def test_the_same_seed_gives_the_same_report():
    def run():
        trace = read_trace(MOONCAKE, seed=3).scaled(8, output_scale=0.05).faster(200)
        return simulate(trace, deployment(512, num_replicas=2, num_steps_ahead=1)).to_json()

    assert run() == run()


requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.lists(st.integers(0, 2), max_size=6), st.floats(0, 9)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(
    requests,
    st.integers(1, 3),
    st.integers(8, 20),
    st.integers(0, 8),
    st.integers(0, 1),
    st.integers(1, 3),
    st.sampled_from([0, 3]),
    st.sampled_from([None, 6.0]),
)
def test_every_request_ends_once_and_every_token_counts(
    drawn, num_turns, num_blocks, num_host_blocks, num_steps_ahead, num_replicas, max_queued_requests, timeout
):
    turns = [Turn(num_prompt, num_output, runs, think) for num_prompt, num_output, runs, think in drawn]
    sessions = [
        Session(start, tuple(turns[place : place + num_turns]))
        for place, (*_, start) in zip(range(0, len(turns), num_turns), sorted(drawn, key=lambda d: d[3]), strict=False)
    ]
    trace = Trace("drawn", tuple(sessions), tokens_per_run=4)
    deployed = deployment(
        num_blocks,
        num_steps_ahead=num_steps_ahead,
        num_replicas=num_replicas,
        num_host_blocks=num_host_blocks,
        max_queued_requests=max_queued_requests,
        timeout=timeout,
        max_num_batched_tokens=16,
    )
    ended = []
    replay = Replay(trace, deployed)
    replayed = replay.run(advance=ended.append)
    replay.check_integrity()
    measured = replayed.measurements
    assert sum(ended) == trace.num_requests == measured.num_answered + measured.num_failed
    assert measured.gaps.total() == measured.num_generated_tokens - measured.num_answered or measured.drops
    assert 0 <= measured.token_slot_seconds <= measured.used_slot_seconds <= measured.slot_seconds
    if not measured.num_failed:
        assert measured.num_generated_tokens == trace.num_output_tokens
        assert measured.num_prompt_tokens == trace.num_prompt_tokens


def test_a_replay_can_be_given_up():
    trace = trace_of(*((float(n), 8, 2) for n in range(50)))
    replayed = Replay(trace, deployment()).run(gives_up=lambda measured: measured.num_answered >= 10)
    assert not replayed.is_complete
    assert 10 <= replayed.measurements.num_answered < 50


@given(st.lists(st.integers(0, 20), min_size=1), st.sampled_from([50, 90, 95, 99, 99.9, 100]))
def test_a_percentile_is_the_least_value_that_enough_samples_do_not_exceed(samples, percent):
    found = distribution(samples, percent)
    value = found.percentile(percent)
    enough = len(samples) * percent / 100 - 1e-9
    assert sum(sample <= value for sample in samples) >= enough
    assert sum(sample < value for sample in samples) < enough
    assert found == distribution(Counter(samples), percent)
    assert found.mean == pytest.approx(sum(samples) / len(samples))
