"""One step scheduled ahead of the last one's result: named cases, one for each thing that is not known ahead."""

import pytest

from paged_cache.block_table import BlockTable
from scheduler.output import KnownRow, NewRow
from scheduler.request import SequenceStatus
from tests.scheduler.bench import Bench


def ahead(**settings):
    return Bench(overlapped=True, **settings)


def stop_token(num_before, prompt_len=5):
    """A token that the first request of a bench says after `num_before` others, and not before."""
    probe = Bench()
    probe.add("a", prompt_len=prompt_len, max_tokens=30)
    probe.drain()
    tokens = probe.tokens["a", 0]
    assert tokens.index(tokens[num_before]) == num_before
    return tokens[num_before]


def preempt_with_a_token_pending(**params):
    """A bench whose first request has just lost its blocks while a launched step samples a token of it."""
    bench = ahead(num_blocks=5, block_size=4, max_num_batched_tokens=16)
    bench.add("short", prompt_len=3, max_tokens=12, seed=5, **params)  # it says no token twice
    bench.add("long", prompt_len=7, max_tokens=12)
    while not bench.scheduler.stats.num_preemptions:
        assert bench.scheduler.has_unfinished
        bench.launch(bench.schedule())
        if len(bench.in_flight) > 1 and not bench.scheduler.stats.num_preemptions:
            bench.update()
    [victim] = bench.requests["short"].sequences
    assert (victim.status, victim.num_pending_tokens) == (SequenceStatus.PREEMPTED, 1)
    return bench, victim


def test_a_decode_is_scheduled_before_its_token_is_known():
    bench = ahead()
    bench.add("a", prompt_len=5, max_tokens=4)
    bench.launch(bench.schedule())
    second = bench.schedule()
    assert [(row.num_computed_tokens, row.num_new_tokens) for row in second.rows] == [(5, 1)]
    assert isinstance(second.rows[0], KnownRow)
    assert bench.requests["a"].sequences[0].num_generated_tokens == 0


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 5])
def test_no_row_is_scheduled_beyond_the_last_token(max_tokens):
    bench = ahead()
    bench.add("a", prompt_len=5, max_tokens=max_tokens)
    outputs = []
    while bench.scheduler.has_unfinished:
        outputs.append(bench.step())
    assert sum(output.num_tokens for output in outputs) == 5 + max(0, max_tokens - 1)
    assert bench.finish_reasons["a", 0] == "length"
    bench.assert_all_exact()


def test_a_stop_token_costs_one_row_whose_result_is_dropped():
    bench = ahead()
    bench.add("a", max_tokens=30, stop_token_ids=(stop_token(3),))
    outputs = []
    while bench.scheduler.has_unfinished:
        outputs.append(bench.step())
    assert [len(output.rows) for output in outputs] == [1] * 5  # the prompt, three tokens, and one row too many
    assert bench.finish_reasons["a", 0] == "stop"
    assert bench.scheduler.stats.num_used_blocks == 0
    assert bench.update() == []
    assert bench.scheduler.stats.num_generation_tokens == 4
    bench.assert_all_exact()


def test_blocks_of_an_ended_sequence_go_to_the_next_while_its_last_row_runs():
    bench = ahead(num_blocks=2, block_size=4)
    bench.add("a", prompt_len=5, max_tokens=3, stop_token_ids=(stop_token(1),))
    bench.add("b", prompt_len=6, max_tokens=2)
    while ("a", 0) not in bench.finish_reasons:
        bench.step()
    [(surplus, _)] = bench.in_flight
    assert [row.seq_id for row in surplus.rows] == [0]
    [row] = bench.step().rows  # the fake runner checks what it reads
    assert (row.seq_id, sorted(row.block_ids)) == (1, [0, 1])
    bench.drain()
    bench.assert_all_exact()


def test_a_token_that_is_sampled_while_its_sequence_is_preempted_is_kept():
    bench, victim = preempt_with_a_token_pending()
    num_tokens = victim.num_tokens
    bench.update()
    assert (victim.num_tokens, victim.num_pending_tokens) == (num_tokens + 1, 0)
    while victim.status is SequenceStatus.PREEMPTED:
        output = bench.step()
    [resumed] = [row for row in output.rows if row.seq_id == victim.seq_id]
    assert isinstance(resumed, NewRow)
    assert len(resumed.token_ids) == num_tokens + 1
    bench.drain()
    bench.assert_all_exact()


def test_a_preempted_sequence_may_end_by_the_token_it_had_pending():
    bench, victim = preempt_with_a_token_pending()
    pending = bench.expected("short")[victim.num_generated_tokens]
    bench, victim = preempt_with_a_token_pending(stop_token_ids=(pending,))
    bench.update()
    assert victim.status is SequenceStatus.FINISHED
    assert bench.finish_reasons["short", 0] == "stop"
    bench.drain()
    bench.assert_all_exact()


@pytest.mark.parametrize("prompt_len", [1, 5, 9])
def test_siblings_are_forked_when_the_prompt_has_come_back(prompt_len):
    bench = ahead(max_num_batched_tokens=4)
    bench.add("a", prompt_len=prompt_len, n=3, max_tokens=5)
    num_prompt_rows = 0
    while bench.requests["a"].awaits_fork:
        num_prompt_rows += len(bench.step().rows)
    assert num_prompt_rows == max(1, -(-(prompt_len - 1) // 4))  # nothing is computed twice while it waits
    bench.drain()
    assert bench.scheduler.stats.num_prompt_tokens == prompt_len
    bench.assert_all_exact()


def test_prompt_scores_are_reported_once():
    bench = ahead(num_blocks=9, block_size=4, max_num_batched_tokens=5)
    for name in "abc":
        bench.add(name, prompt_len=9, max_tokens=12, n=2, prompt_logprobs=0)
    bench.drain()
    assert bench.scheduler.stats.num_preemptions > 0
    for name in "abc":
        assert bench.prompt_logprobs[name] == list(bench.requests[name].prompt_token_ids[1:])


@pytest.mark.parametrize("num_launched", [1, 2])
def test_abort_drops_every_step_in_flight(num_launched):
    bench = ahead()
    bench.add("a", n=2, prompt_len=1, max_tokens=9)
    bench.add("b", max_tokens=3)
    for _ in range(num_launched):
        bench.launch(bench.schedule())
    bench.abort("a")
    if num_launched == 2:
        bench.update()
    bench.drain()
    assert set(bench.tokens) == {("b", 0)}
    assert bench.step().rows == ()
    assert bench.runner.states == {}


def test_a_sequence_may_fill_the_window_and_the_pool():
    bench = ahead(num_blocks=4, block_size=4, max_model_len=16)
    bench.add("a", prompt_len=5, max_tokens=11)
    bench.drain()
    assert len(bench.tokens["a", 0]) == 11


def test_steps_are_at_most_two_and_updated_in_order():
    bench = ahead()
    bench.add("a")
    for _ in range(2):
        bench.launch(bench.schedule())
    with pytest.raises(AssertionError, match="third step"):
        bench.scheduler.schedule()
    output, pending = bench.in_flight[1]
    with pytest.raises(AssertionError, match="order"):
        bench.scheduler.update(output, pending.result())


def test_a_shared_prompt_that_is_preempted_meanwhile_is_not_forked():
    bench = ahead(num_blocks=11, block_size=1, max_num_batched_tokens=3)
    bench.add("a", prompt_len=1, max_tokens=8)
    for _ in range(2):
        bench.step()
    bench.add("b", prompt_len=6, max_tokens=2, n=2)
    while not bench.scheduler.stats.num_preemptions:
        assert bench.scheduler.has_unfinished
        bench.launch(bench.schedule())
        if not bench.scheduler.stats.num_preemptions:
            bench.update()
    [prompt] = bench.requests["b"].sequences
    [completing] = [row for row in bench.in_flight[0][0].rows if row.seq_id == prompt.seq_id]
    assert (completing.end, prompt.status) == (5, SequenceStatus.PREEMPTED)
    bench.update()
    assert bench.requests["b"].awaits_fork  # its blocks are gone: nothing is left to share
    bench.drain()
    bench.assert_all_exact()


def test_blocks_lost_for_good_are_reported_and_not_waited_for():
    """A step without rows is no progress: a loop that counted it as one would turn for ever."""
    bench = ahead(num_blocks=8, block_size=4)
    bench.add("last", prompt_len=5, max_tokens=1)
    bench.launch(bench.schedule())
    bench.add("stuck", prompt_len=9)
    manager = bench.manager
    assert manager.allocate(BlockTable(), 0, manager.num_free_blocks * 4) is not None
    empty = bench.scheduler.schedule()  # the first request's end is not known yet
    assert not empty.rows
    output, pending = bench.in_flight.popleft()
    bench.scheduler.update(output, pending.result())
    with pytest.raises(AssertionError, match="no progress"):
        bench.scheduler.schedule()
    assert bench.scheduler.stats.num_steps == 1
