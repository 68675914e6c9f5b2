"""Preemption, swapping, priorities, fair shares and the queue's bounds: named cases of who must make room for whom."""

import pytest

from scheduler.sampling_params import BeamSearch, StructuredOutput
from tests.scheduler.bench import Bench

SWAPS = {"recompute_seconds_per_token": 1.0, "swap_seconds_per_block": 0.1}
CHUNKS = {"max_num_batched_tokens": 3}
OVERLAP = pytest.mark.parametrize("overlapped", [False, True])


def num_preemptions(bench, name):
    return sum(sequence.num_preemptions for sequence in bench.requests[name].sequences)


def steps_until(bench, name, most=200):
    """Steps until a request has its first token."""
    for num_steps in range(1, most):
        bench.step()
        if bench.tokens.get((name, 0)):
            return num_steps
    raise AssertionError(f"{name} has no token after {most} steps")


# --- swapping ---


@OVERLAP
def test_swapped_blocks_come_back_and_nothing_is_computed_again(overlapped):
    bench = Bench(num_blocks=8, num_host_blocks=20, enable_prefix_caching=False, overlapped=overlapped, **SWAPS)
    for name in "abcd":
        bench.add(name, prompt_len=6, max_tokens=20)
    bench.drain()
    stats = bench.scheduler.stats
    assert stats.num_preemptions > 0
    assert stats.num_swapped_in_blocks == stats.num_swapped_out_blocks > 0
    assert stats.num_recomputed_tokens == 0
    assert all(preemption.is_swapped for report in bench.reports.values() for preemption in report.preemptions)
    bench.assert_all_exact()


def test_blocks_that_are_cached_still_are_not_copied_back():
    bench = Bench(num_blocks=8, num_host_blocks=20, **SWAPS)
    for name in "abcd":
        bench.add(name, prompt_len=6, max_tokens=20)
    bench.drain()
    stats = bench.scheduler.stats
    assert stats.num_swapped_in_blocks < stats.num_swapped_out_blocks
    assert stats.num_recomputed_tokens == 0
    bench.assert_all_exact()


@pytest.mark.parametrize(
    "settings", [{"num_host_blocks": 1}, {"num_host_blocks": 20, "swap_seconds_per_block": 9.0}, {"num_host_blocks": 0}]
)
def test_without_room_on_the_host_or_where_that_takes_longer_tokens_are_computed_again(settings):
    bench = Bench(num_blocks=8, enable_prefix_caching=False, **{**SWAPS, **settings})
    for name in "ab":
        bench.add(name, prompt_len=12, max_tokens=18)
    bench.drain()
    stats = bench.scheduler.stats
    assert stats.num_preemptions > 0
    assert stats.num_swapped_out_blocks == 0
    assert stats.num_recomputed_tokens > 0
    bench.assert_all_exact()


def test_a_swapped_sequence_that_is_aborted_leaves_the_host():
    bench = Bench(num_blocks=8, num_host_blocks=20, **SWAPS)
    for name in "ab":
        bench.add(name, prompt_len=12, max_tokens=18)
    while not bench.scheduler.stats.num_used_host_blocks:
        bench.step()
    [swapped] = [name for name in "ab" if num_preemptions(bench, name)]
    bench.abort(swapped)
    assert bench.scheduler.stats.num_used_host_blocks == 0
    bench.drain()
    bench.assert_all_right()


def test_what_is_swapped_out_as_a_copy_was_to_be_made_of_it_is_whole():
    """A sibling gives way in the step in which it was to copy the block that it shares: its own is empty still."""
    for num_blocks in range(5, 12):
        bench = Bench(num_blocks=num_blocks, num_host_blocks=30, enable_prefix_caching=False, **SWAPS)
        bench.add("a", prompt_len=6, max_tokens=10, n=3)
        bench.add("b", prompt_len=6, max_tokens=10, n=2)
        bench.drain()
        bench.assert_all_exact()


def test_a_shared_prompt_that_gives_way_before_its_siblings_are_forked_comes_back_whole():
    """As it is admitted again they are forked at once, and copy the block that the prompt ends in."""
    num_early = 0
    for prompt_len in range(8, 16):
        for num_spare in range(2, 5):
            bench = Bench((prompt_len + 1) // 2 + num_spare, 2, True, num_host_blocks=30, **SWAPS, **CHUNKS)
            bench.add("a", prompt_len=1, max_tokens=10)
            for _ in range(2):
                bench.step()
            bench.add("b", prompt_len=prompt_len, priority=1, max_tokens=2, n=3)
            while bench.requests["b"].awaits_fork:
                before = num_preemptions(bench, "b")
                bench.step()
                is_early = bench.requests["b"].awaits_fork and num_preemptions(bench, "b") > before
                num_early += is_early and bench.counts[bench.requests["b"].first_seq_id].end == prompt_len - 1
            bench.drain()
            bench.assert_all_exact()
    assert num_early > 0


# --- priorities ---


@OVERLAP
def test_a_better_class_takes_the_slot_of_a_worse_one(overlapped):
    bench = Bench(max_num_seqs=2, overlapped=overlapped, ageing_seconds=0.0)
    bench.add("low", priority=1, max_tokens=30)
    bench.add("lowest", priority=2, max_tokens=30)
    for _ in range(4):
        bench.step()
    bench.add("high", priority=0, max_tokens=3)
    assert steps_until(bench, "high") <= 2
    assert (num_preemptions(bench, "low"), num_preemptions(bench, "lowest")) == (0, 1)
    bench.drain()
    [preemption] = bench.reports["lowest"].preemptions
    assert (preemption.by_request_id, preemption.cause) == ("high", "priority")
    bench.assert_all_exact()


def test_a_better_class_takes_the_blocks_of_a_worse_one():
    bench = Bench(num_blocks=10, ageing_seconds=0.0)
    bench.add("low", priority=1, prompt_len=20, max_tokens=15)
    bench.step()
    bench.add("high", prompt_len=20, max_tokens=3)
    assert steps_until(bench, "high") == 1
    assert num_preemptions(bench, "low") == 1
    bench.drain()
    bench.assert_all_exact()


@pytest.mark.parametrize("sharing", [{"n": 3}, {"beam_search": BeamSearch(3)}])
def test_a_better_class_takes_the_blocks_that_answers_of_a_worse_one_share(sharing):
    bench = Bench(num_blocks=40, max_num_batched_tokens=120, ageing_seconds=0.0)
    bench.add("low", priority=1, prompt_len=100, max_tokens=40, **sharing)
    for _ in range(4):
        bench.step()
    bench.add("high", prompt_len=100, max_tokens=2)
    assert steps_until(bench, "high") == 1
    bench.drain()
    bench.assert_all_exact()


def test_nobody_gives_way_whose_blocks_the_better_class_would_share_and_be_no_better_off():
    bench = Bench(num_blocks=24, max_num_batched_tokens=64, ageing_seconds=0.0)
    prompt = tuple(range(40))
    bench.add("equal", prompt=prompt[20:], max_tokens=30)
    bench.add("low", priority=5, prompt=prompt, max_tokens=10)
    for _ in range(2):
        bench.step()
    bench.add("high", prompt=(*prompt, *range(33)), max_tokens=2)
    bench.step()
    assert bench.scheduler.stats.num_preemptions == 0
    bench.drain()
    bench.assert_all_exact()


def test_equals_do_not_give_way_for_a_slot():
    bench = Bench(max_num_seqs=2)
    for name in "abcd":
        bench.add(name, max_tokens=8)
    bench.drain()
    assert bench.scheduler.stats.num_preemptions == 0


def test_nobody_gives_way_where_that_would_not_make_enough_room():
    bench = Bench(num_blocks=10, ageing_seconds=0.0)
    bench.add("equal", prompt_len=20, max_tokens=8)
    bench.add("low", priority=1, prompt_len=4, max_tokens=8)
    bench.step()
    bench.add("big", prompt_len=30, max_tokens=3)
    bench.step()
    assert bench.scheduler.stats.num_preemptions == 0
    bench.drain()
    bench.assert_all_exact()


@pytest.mark.parametrize("ageing_seconds", [0.0, 1.0])
def test_waiting_lifts_a_request_over_later_ones_of_better_classes(ageing_seconds):
    bench = Bench(max_num_seqs=1, ageing_seconds=ageing_seconds)
    bench.add("running", priority=-1, max_tokens=8)
    bench.step()
    bench.add("low", priority=1, max_tokens=2)
    bench.tick(5.0)
    bench.add("late", priority=0, max_tokens=2)
    bench.drain()
    ends = [name for name, _ in bench.finish_reasons]
    assert ends == (["running", "low", "late"] if ageing_seconds else ["running", "late", "low"])


def test_classes_do_not_take_turns():
    bench = Bench(num_blocks=10, max_num_seqs=2, ageing_seconds=0.5)
    for i in range(8):
        bench.add(f"r{i}", priority=i % 3, prompt_len=8, max_tokens=12)
        bench.step()
        bench.tick(0.3)
    bench.drain()
    assert max(num_preemptions(bench, name) for name in bench.requests) <= bench.config.max_preemptions + 1
    bench.assert_all_exact()


# --- fair shares ---


@pytest.mark.parametrize("ageing_seconds", [0.0, 5.0])
def test_waiting_lifts_whoever_gave_way_to_better_classes_too(ageing_seconds):
    bench = Bench(max_num_seqs=1, ageing_seconds=ageing_seconds)
    bench.add("patient", priority=5, max_tokens=30)
    bench.step()
    bench.add("urgent", max_tokens=2)
    for number in range(40):  # one of a better class always waits
        bench.add(f"urgent{number}", max_tokens=2)
        for _ in range(2):
            bench.step()
        bench.now += 1.0
    assert ("patient" in {name for name, _ in bench.finish_reasons}) == (ageing_seconds > 0)
    bench.drain()


def test_a_burst_of_one_tenant_leaves_the_others_their_slots():
    bench = Bench(max_num_seqs=4, num_blocks=100, max_num_batched_tokens=100)
    for i in range(20):
        bench.add(f"burst{i}", tenant="a", max_tokens=40)
    bench.step()
    assert bench.scheduler.stats.num_running == 4
    bench.add("steady", tenant="b", max_tokens=5)
    assert steps_until(bench, "steady") <= 2
    assert sum(num_preemptions(bench, f"burst{i}") for i in range(20)) == 1
    bench.drain()
    causes = {p.cause for report in bench.reports.values() for p in report.preemptions}
    assert causes == {"fair_share"}
    bench.assert_all_exact()


def test_in_a_class_the_tenant_that_has_had_least_goes_first():
    bench = Bench(max_num_seqs=1)
    for i in range(4):
        bench.add(f"a{i}", tenant="a", max_tokens=4)
    bench.step()
    for i in range(2):
        bench.add(f"b{i}", tenant="b", max_tokens=4)
    bench.drain()
    ends = [name for name, _ in bench.finish_reasons]
    assert ends.index("b0") <= 2
    assert ends.index("b1") <= 4


def test_a_long_prompt_does_not_hold_up_short_ones():
    bench = Bench(num_blocks=100, max_num_batched_tokens=16)
    bench.add("long", prompt_len=180, max_tokens=2)
    bench.step()
    for i in range(3):
        bench.add(f"short{i}", prompt_len=4, max_tokens=2)
    assert max(steps_until(bench, f"short{i}") for i in range(3)) <= 3
    bench.drain()
    bench.assert_all_exact()


# --- bounds and deadlines ---


def test_who_finds_the_queue_full_is_told_at_once():
    bench = Bench(max_num_seqs=1, max_queued_requests=2)
    bench.add("running", max_tokens=5)
    bench.step()
    for name in ("first", "second", "third"):
        bench.add(name)
    assert [(d.request_id, d.cause) for d in bench.dropped.values()] == [("third", "queue_full")]
    assert bench.scheduler.stats.num_dropped_queue_full == 1
    bench.drain()
    assert {name for name, _ in bench.finish_reasons} == {"running", "first", "second"}


def test_the_worst_class_and_the_tenant_with_the_most_waiting_give_way():
    bench = Bench(max_num_seqs=1, max_queued_requests=3, ageing_seconds=0.0)
    bench.add("running", priority=-1, tenant="a", max_tokens=5)
    bench.step()
    bench.add("a1", tenant="a")
    bench.add("low", priority=1, tenant="b")
    bench.add("a2", tenant="a")
    bench.add("b1", tenant="b")
    assert list(bench.dropped) == ["low"]
    bench.add("b2", tenant="b", prompt_len=2)
    assert list(bench.dropped) == ["low", "a2"]
    bench.drain()


def test_the_queue_is_bounded_in_tokens_too():
    bench = Bench(num_blocks=10, max_queued_tokens=30)
    bench.add("running", prompt_len=30, max_tokens=8)
    bench.step()
    bench.add("first", prompt_len=24, max_tokens=1)
    bench.add("second", prompt_len=24, max_tokens=1)
    assert list(bench.dropped) == ["second"]
    bench.drain()


def test_a_queue_with_free_room_behind_it_is_not_full():
    bench = Bench(num_blocks=50, max_num_seqs=6, max_queued_requests=1, max_queued_tokens=10)
    for i in range(6):
        bench.add(f"r{i}", prompt_len=20, max_tokens=1)
    assert not bench.dropped
    bench.drain()


@pytest.mark.parametrize(("priority", "gives_way"), [(0, "structured"), (-1, "last")])
def test_a_full_queue_is_no_fuller_for_whoever_waits_for_a_grammar(priority, gives_way):
    bench = Bench(max_num_seqs=1, max_queued_requests=2)
    bench.add("running", max_tokens=9)
    bench.step()
    for name in ("first", "last"):
        bench.add(name)
    bench.add("structured", priority=priority, structured_output=StructuredOutput("json_object"), with_grammar=False)
    assert list(bench.dropped) == [gives_way]
    if gives_way == "last":
        bench.provide_grammar("structured")
    bench.drain()


def test_whoever_waits_keeps_its_place_though_those_who_run_have_taken_the_room_meanwhile():
    bench = Bench(num_blocks=40, block_size=4, max_num_seqs=2, max_queued_tokens=8, max_model_len=150)
    for name in ("a", "b"):
        bench.add(name, prompt_len=8, max_tokens=60)
    bench.step()
    for name in ("c", "d", "e", "f"):
        bench.add(name, prompt_len=30)
    assert not bench.dropped
    while bench.manager.num_free_blocks > 15:
        bench.step()
    bench.add("g", prompt_len=1)
    assert list(bench.dropped) == ["g"]
    bench.drain()


@pytest.mark.parametrize("limit", ["queue_timeout", "timeout"])
def test_who_waits_too_long_is_dropped_before_any_work(limit):
    bench = Bench(max_num_seqs=1)
    bench.add("running", max_tokens=9)
    bench.step()
    bench.add("late", **{limit: 1.0})
    bench.add("patient")
    bench.tick(0.9)
    bench.step()
    assert not bench.dropped
    bench.tick(0.2)
    bench.step()
    assert bench.dropped["late"].cause == ("queue_timeout" if limit == "queue_timeout" else "deadline")
    bench.drain()
    assert ("late", 0) not in bench.tokens
    bench.assert_all_right()


def test_a_queue_timeout_is_over_with_the_admission_and_a_deadline_is_not():
    bench = Bench()
    bench.add("queue", queue_timeout=1.0, max_tokens=9)
    bench.add("whole", timeout=1.0, max_tokens=9)
    bench.step()
    bench.tick(2.0)
    bench.drain()
    assert bench.finish_reasons == {("queue", 0): "length"}
    assert bench.dropped["whole"].cause == "deadline"
    bench.assert_all_right()


def test_who_waits_for_a_grammar_is_dropped_too():
    bench = Bench()
    bench.add("a", queue_timeout=1.0, structured_output=StructuredOutput("json_object"), with_grammar=False)
    bench.tick(2.0)
    assert bench.dropped["a"].cause == "queue_timeout"
    assert not bench.scheduler.has_unfinished
    bench.provide_grammar("a")
    bench.scheduler.check_integrity()


def test_a_starving_request_is_named_once_with_its_reason():
    bench = Bench(max_num_seqs=1, starving_seconds=10.0)
    bench.add("running", max_tokens=30)
    bench.step()
    bench.add("head")
    bench.step()
    assert bench.scheduler.ledger.starving(bench.now) == []
    bench.tick(11.0)
    bench.step()
    [starvation] = bench.scheduler.ledger.starving(bench.now)
    assert (starvation.request_id, starvation.reason) == ("head", "max_num_seqs")
    assert bench.scheduler.ledger.starving(bench.now) == []
    assert bench.scheduler.stats.num_starving == 1
    bench.drain()
    assert bench.scheduler.stats.num_starving == 0
