"""The scheduler against a fake runner that checks every slot: named cases, one for each rule."""

from array import array
from collections import Counter
from itertools import islice

import pytest

from scheduler.admission import RequestRefused
from scheduler.config import SchedulerConfig
from scheduler.output import KnownRow, NewRow
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.scheduler.bench import Bench


def test_one_request_is_prefilled_whole_then_decoded():
    bench = Bench()
    bench.add("a", prompt_len=5, max_tokens=3)
    assert [bench.step().num_tokens for _ in range(3)] == [5, 1, 1]
    assert not bench.scheduler.has_unfinished
    assert bench.finish_reasons == {("a", 0): "length"}
    bench.assert_all_exact()


def test_the_runner_gets_a_diff_after_the_first_step():
    bench = Bench(block_size=4)
    bench.add("a", prompt_len=4, max_tokens=6)
    first, second, third = bench.step().rows[0], bench.step().rows[0], bench.step().rows[0]
    assert isinstance(first, NewRow)
    assert len(first.block_ids) == 1
    assert isinstance(second, KnownRow)
    assert len(second.new_block_ids) == 1
    assert third.new_block_ids == ()


def test_prompts_are_computed_in_chunks_of_the_budget_beside_decodes():
    bench = Bench(max_num_batched_tokens=8)
    bench.add("decoding", prompt_len=3, max_tokens=20)
    bench.step()
    bench.add("long", prompt_len=30)
    output = bench.step()
    assert [row.num_new_tokens for row in output.rows] == [1, 7]
    bench.drain()
    bench.assert_all_exact()


@pytest.mark.parametrize(
    ("num_short", "parts"), [(0, [16]), (1, [3, 13]), (2, [3, 3, 10]), (4, [3, 3, 3, 3, 4]), (5, [3, 3, 3, 3, 4])]
)
def test_a_long_prefill_leaves_room_for_short_prompts_and_takes_what_they_leave(num_short, parts):
    bench = Bench(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    bench.add("long", prompt_len=100)
    for number in range(num_short):
        bench.add(f"short{number}", prompt_len=3)
    output = bench.step()
    assert sorted(row.num_new_tokens for row in output.rows) == parts
    bench.drain()
    bench.assert_all_exact()


def test_without_a_cap_a_long_prefill_leaves_half_of_a_step_to_short_prompts():
    bench = Bench(max_num_batched_tokens=16)
    bench.add("long", prompt_len=100)
    bench.add("short", prompt_len=8)
    output = bench.step()
    assert sorted(row.num_new_tokens for row in output.rows) == [8, 8]
    bench.drain()
    bench.assert_all_exact()


def test_max_num_seqs_is_the_most_that_run_at_once():
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name)
    assert len(bench.step().rows) == 2
    assert bench.scheduler.stats.num_waiting == 1
    bench.drain()
    bench.assert_all_exact()


def test_the_statistics_tell_what_is_shared_cached_and_empty():
    bench = Bench(block_size=4)
    bench.add("a", prompt_len=9, n=3, max_tokens=8)
    bench.add("b", prompt_len=6, max_tokens=3)
    seen = set()
    while bench.scheduler.has_unfinished:
        bench.step()
        stats, pool = bench.scheduler.stats, bench.scheduler.report_pool()
        block_ids = array("i", pool.block_ids)
        holders = Counter(block_ids)
        tables = iter(block_ids)
        slots = set()
        for holder in pool.holders:
            table = list(islice(tables, holder.num_blocks))
            slots |= {(table[place // 4], place % 4) for place in range(holder.num_computed_tokens)}
        assert stats.num_used_blocks == len(holders)
        assert stats.num_shared_blocks == sum(count > 1 for count in holders.values())
        assert stats.num_saved_blocks == holders.total() - len(holders)
        assert stats.num_cached_blocks == sum(pool.is_cached)
        assert stats.num_evictable_blocks == sum(
            pool.is_cached[block_id] for block_id in range(64) if block_id not in holders
        )
        assert stats.num_empty_slots == 4 * len(holders) - len(slots)
        seen.add((stats.num_shared_blocks, stats.num_saved_blocks))
        seen.add((stats.num_cached_blocks, stats.num_evictable_blocks))
    assert {(2, 4), (3, 0)} <= seen, seen
    assert 0 < stats.num_evictable_blocks == stats.num_cached_blocks


def test_preemption_recomputes_and_changes_no_token():
    bench = Bench(num_blocks=8, block_size=4)
    for name in "abcd":
        bench.add(name, prompt_len=6, max_tokens=20)
    furthest: Counter[int] = Counter()  # what sequences have had computed, by seq_id
    num_again = num_prompt_again = 0
    while bench.scheduler.has_unfinished:
        for row in bench.step().rows:
            last = min(furthest[row.seq_id], row.end)
            num_again += max(0, last - row.num_computed_tokens)
            num_prompt_again += max(0, min(last, 6) - row.num_computed_tokens)
            furthest[row.seq_id] = max(furthest[row.seq_id], row.end)
    stats = bench.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.num_recomputed_tokens, stats.num_recomputed_prompt_tokens) == (num_again, num_prompt_again)
    assert 0 < num_prompt_again < num_again
    bench.assert_all_exact()


def test_the_preempted_resume_before_new_work():
    bench = Bench(num_blocks=8, block_size=4)
    for name in "ab":
        bench.add(name, prompt_len=12, max_tokens=16)
    while not bench.scheduler.stats.num_preemptions:
        bench.step()
    bench.add("late", prompt_len=1, max_tokens=1)
    while ("late", 0) not in bench.finish_reasons:
        bench.step()
    # The newcomer would have fitted all along; it waited for whoever was there before it.
    assert len(bench.tokens["a", 0]) + len(bench.tokens["b", 0]) >= 17
    bench.drain()
    bench.assert_all_exact()


def test_the_victim_is_the_one_with_the_least_computed_work():
    bench = Bench(num_blocks=10, block_size=4)
    bench.add("short", prompt_len=3, max_tokens=30)
    bench.add("long", prompt_len=20, max_tokens=15)
    while not bench.scheduler.stats.num_preemptions:
        bench.step()
    [short] = bench.requests["short"].sequences
    [long] = bench.requests["long"].sequences
    assert (short.num_preemptions, long.num_preemptions) == (1, 0)
    bench.drain()
    bench.assert_all_exact()


def test_n_sequences_share_the_prompt_and_copy_on_write():
    bench = Bench(num_blocks=64, block_size=4)
    bench.add("a", prompt_len=10, n=3, max_tokens=6)
    copies = bench.step().block_copies
    assert copies == ()
    used_after_prefill = bench.scheduler.stats.num_used_blocks
    copies = bench.step().block_copies
    # Two of the three copy the shared partial block; the last one writes in place.
    assert len(copies) == 2
    assert len({copy.src for copy in copies}) == 1
    assert bench.scheduler.stats.num_used_blocks == used_after_prefill + 2
    bench.drain()
    assert bench.scheduler.stats.num_prompt_tokens == 10
    bench.assert_all_exact()


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 8, 9])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_n_sequences_are_exact_at_every_edge(prompt_len, max_num_seqs):
    bench = Bench(num_blocks=6, block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=3)
    bench.add("a", prompt_len=prompt_len, n=4, max_tokens=6)
    bench.add("b", prompt_len=prompt_len, n=2, max_tokens=6)
    bench.drain()
    bench.assert_all_exact()


def test_siblings_without_room_run_before_later_requests():
    bench = Bench(max_num_seqs=1)
    bench.add("a", n=3, max_tokens=4)
    bench.add("b", max_tokens=4)
    bench.drain()
    assert list(bench.finish_reasons) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    bench.assert_all_exact()


def test_a_newcomer_leaves_a_block_for_each_running_sequence():
    bench = Bench(num_blocks=4, block_size=4)
    bench.add("running", prompt_len=7, max_tokens=3)
    bench.step()
    bench.add("newcomer", prompt_len=7, max_tokens=1)
    assert len(bench.step().rows) == 1  # two blocks are free, and the decode may need one of them
    bench.drain()
    assert bench.scheduler.stats.num_preemptions == 0
    bench.assert_all_exact()


@pytest.mark.parametrize("n", [3, 4])
def test_a_preempted_row_gives_its_budget_back(n):
    # More sequences decode than the budget has tokens, and one that has its row already gives way.
    bench = Bench(num_blocks=4, block_size=4, max_num_batched_tokens=3)
    bench.add("a", prompt_len=1, max_tokens=8)
    bench.add("b", prompt_len=7, max_tokens=8, n=n)
    bench.drain()  # each step checks that nobody is passed over while budget is left
    assert bench.scheduler.stats.num_preemptions > 0
    bench.assert_all_exact()


def test_stop_tokens_end_a_sequence_unless_ignored():
    probe = Bench()
    probe.add("a", max_tokens=20)
    probe.drain()
    tokens = probe.tokens["a", 0]
    stop = tokens[7]
    first = tokens.index(stop)
    for params, config, expected in [
        ({"stop_token_ids": (stop,)}, {}, (first + 1, "stop")),
        ({}, {"eos_token_ids": frozenset({stop})}, (first + 1, "stop")),
        ({"ignore_eos": True}, {"eos_token_ids": frozenset({stop})}, (20, "length")),
    ]:
        bench = Bench(**config)
        bench.add("a", max_tokens=20, **params)
        bench.drain()
        assert (len(bench.tokens["a", 0]), bench.finish_reasons["a", 0]) == expected


def test_max_tokens_zero_computes_the_prompt_only():
    bench = Bench(max_num_batched_tokens=4)
    bench.add("a", prompt_len=10, max_tokens=0, prompt_logprobs=0)
    bench.drain()
    assert bench.tokens["a", 0] == []
    assert bench.finish_reasons["a", 0] == "length"
    assert bench.prompt_logprobs["a"] == list(bench.requests["a"].prompt_token_ids[1:])


@pytest.mark.parametrize("n", [1, 3])
def test_prompt_logprobs_are_reported_once_whatever_happens(n):
    bench = Bench(num_blocks=9, block_size=4, max_num_batched_tokens=5)
    for name in "abc":
        bench.add(name, prompt_len=9, max_tokens=12, n=n, prompt_logprobs=0)
    bench.drain()
    assert bench.scheduler.stats.num_preemptions > 0
    for name in "abc":
        assert bench.prompt_logprobs[name] == list(bench.requests[name].prompt_token_ids[1:])


@pytest.mark.parametrize(
    ("prompt_len", "params", "param"),
    [(0, {}, "prompt"), (190, {"max_tokens": 11}, "max_tokens"), (20, {"max_tokens": 13}, "max_tokens")],
)
def test_what_cannot_fit_is_refused_at_the_door(prompt_len, params, param):
    bench = Bench(num_blocks=8 if prompt_len == 20 else 64, block_size=4)
    with pytest.raises(RequestRefused) as refused:
        bench.add("a", prompt_len=prompt_len, **params)
    assert refused.value.param == param
    assert not bench.scheduler.has_unfinished


def test_what_just_fits_an_empty_pool_runs():
    bench = Bench(num_blocks=8, block_size=4)
    bench.add("whole", prompt_len=20, max_tokens=12)
    bench.add("other", prompt_len=20, max_tokens=12)
    bench.drain()
    bench.assert_all_exact()


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    bench = Bench()
    bench.add("a")
    with pytest.raises(RequestRefused):
        bench.scheduler.add(Request("a", (1,), SamplingParams(max_tokens=1), 0.0))
    bench.drain()
    bench.finish_reasons.clear()
    bench.add("a")
    bench.abort("a")
    bench.add("a")
    bench.drain()
    assert bench.finish_reasons == {("a", 0): "length"}


def test_abort_works_in_every_state():
    bench = Bench(num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=8)
    bench.add("running", prompt_len=6, max_tokens=20)
    bench.add("prefilling", prompt_len=10, max_tokens=8)
    bench.add("waiting", prompt_len=6)
    bench.step()
    for name in ["waiting", "prefilling", "running", "unknown", "running"]:
        bench.abort(name)
        bench.scheduler.check_integrity()
    assert not bench.scheduler.has_unfinished
    assert bench.scheduler.stats.num_used_blocks == 0

    for name in "ab":
        bench.add(name, prompt_len=12, max_tokens=16)
    while not bench.scheduler.stats.num_preemptions:
        bench.step()
    bench.abort("b")
    bench.abort("a")
    bench.scheduler.check_integrity()
    assert bench.scheduler.stats.num_used_blocks == 0
    assert bench.step().rows == ()  # the runner is told to forget them
    assert bench.runner.states == {}


def test_abort_of_one_sequence_leaves_its_siblings():
    bench = Bench()
    bench.add("a", n=3, max_tokens=10)
    bench.step()
    bench.step()
    bench.abort("a", index=1)
    bench.drain()
    assert bench.tokens["a", 0] == bench.expected("a", 0)
    assert bench.tokens["a", 2] == bench.expected("a", 2)
    assert ("a", 1) not in bench.finish_reasons


@pytest.mark.parametrize("prompt_len", [1, 9])
@pytest.mark.parametrize("aborted", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_abort_of_a_sequence_before_the_fork_leaves_its_siblings(prompt_len, aborted):
    bench = Bench(max_num_batched_tokens=4)
    bench.add("a", prompt_len=prompt_len, n=3, max_tokens=6)
    for index in aborted:
        bench.abort("a", index)
    bench.drain()
    left = [index for index in range(3) if index not in aborted]
    assert sorted(bench.finish_reasons) == [("a", index) for index in left]
    for index in left:
        assert bench.tokens["a", index] == bench.expected("a", index)


def test_abort_between_schedule_and_update_drops_the_result():
    bench = Bench()
    bench.add("a")
    output = bench.scheduler.schedule()
    result = bench.runner.launch(output).result()
    bench.abort("a")
    assert bench.scheduler.update(output, result) == []
    bench.scheduler.check_integrity()


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_without_progress_are_refused(limit):
    with pytest.raises(ValueError, match=limit):
        SchedulerConfig(**{"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, limit: 0})
