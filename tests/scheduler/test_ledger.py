"""The books of requests: waits add up to the time waited, starvation is told once, and nothing is kept for ever."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_cache.manager import BlockManager
from paged_cache.prefix_cache import CachedPrefix
from scheduler.ledger import (
    MAX_REPORTED_BLOCKS,
    MAX_REPORTED_PREEMPTIONS,
    MAX_REPORTED_SEQUENCES,
    RequestLedger,
)
from scheduler.output import Dropped
from scheduler.request import Request, Sequence, SequenceStatus
from scheduler.request_report import WaitReason
from scheduler.sampling_params import SamplingParams
from tests.scheduler.bench import Bench

REASONS: tuple[WaitReason, ...] = ("behind_others", "max_num_seqs", "kv_blocks", "token_budget")
NOTHING = CachedPrefix((), 0, 0, None)
SEQ_IDS = itertools.count()


def make_request(name="a", prompt_len=10, n=1, **fields) -> Request:
    request = Request(name, tuple(range(prompt_len)), SamplingParams(max_tokens=5, n=n), 0.0, **fields)
    add_sequence(request)
    return request


def add_sequence(request: Request, status=SequenceStatus.WAITING) -> Sequence:
    prefix = BlockManager(1, 4).new_prefix("")
    index = len(request.sequences)
    sequence = Sequence(next(SEQ_IDS), request, index, list(request.prompt_token_ids), prefix, status=status)
    request.sequences.append(sequence)
    request.num_created_sequences += 1
    return sequence


def admit(ledger: RequestLedger, sequence: Sequence, now: float, cached=NOTHING) -> None:
    sequence.status = SequenceStatus.RUNNING
    ledger.admitted(sequence, now, cached)


def preempt(ledger: RequestLedger, sequence: Sequence, now: float, by: Sequence, *, is_swapped=False) -> None:
    ledger.preempted(sequence, now, by, "kv_blocks", is_swapped)
    sequence.status = SequenceStatus.PREEMPTED


def end(ledger: RequestLedger, sequence: Sequence, now: float, reason="stop") -> None:
    sequence.status = SequenceStatus.FINISHED
    ledger.ended(sequence, now, reason)


@given(st.lists(st.tuples(st.sampled_from(REASONS), st.integers(0, 50)), max_size=20))
def test_waits_add_up_by_reason(turns):
    ledger, request = RequestLedger(0.0), make_request()
    ledger.queued(request, 100.0)
    now, expected = 100.0, dict.fromkeys(REASONS, 0.0)
    reason = "behind_others"
    for next_reason, seconds in turns:
        now += seconds
        expected[reason] += seconds
        reason = next_reason
        ledger.waits(request, reason, now)
        assert sum(ledger.report("a", now + 3).wait_seconds.values()) == now + 3 - 100
        assert ledger.report("a", now).wait_reason == reason
    expected[reason] += 7
    admit(ledger, request.sequences[0], now + 7)
    report = ledger.report("a", now + 20)
    assert {r: report.wait_seconds.get(r, 0.0) for r in REASONS} == expected
    assert report.wait_reason is None
    assert report.queue_seconds == now + 7 - 100


def test_who_is_no_longer_next_waits_behind_others():
    ledger, first, second = RequestLedger(0.0), make_request("a"), make_request("b")
    ledger.queued(first, 0.0)
    ledger.queued(second, 0.0)
    ledger.waits(first, "kv_blocks", 1.0)
    ledger.waits(second, "max_num_seqs", 3.0)  # it has passed the first
    assert ledger.report("a", 6.0).wait_seconds == {"behind_others": 1.0 + 3.0, "kv_blocks": 2.0}
    assert ledger.report("b", 6.0).wait_seconds == {"behind_others": 3.0, "max_num_seqs": 3.0}
    admit(ledger, second.sequences[0], 6.0)
    ledger.waits(first, "kv_blocks", 6.0)
    assert ledger.report("a", 7.0).wait_reason == "kv_blocks"


def test_who_has_run_and_is_no_longer_next_waits_as_preempted():
    ledger, first, second = RequestLedger(0.0), make_request("a"), make_request("b")
    ledger.queued(first, 0.0)
    ledger.queued(second, 0.0)
    admit(ledger, first.sequences[0], 0.0)
    preempt(ledger, first.sequences[0], 1.0, second.sequences[0])
    ledger.waits(first, "kv_blocks", 2.0)
    ledger.waits(second, "kv_blocks", 4.0)
    assert ledger.report("a", 7.0).wait_seconds == {"behind_others": 0.0, "preempted": 1.0 + 3.0, "kv_blocks": 2.0}


def test_a_request_waits_for_its_grammar_first():
    ledger, request = RequestLedger(0.0), make_request()
    request.sequences[0].status = SequenceStatus.WAITING_FOR_GRAMMAR
    ledger.queued(request, 0.0)
    assert ledger.report("a", 1.0).state == "waiting_for_grammar"
    request.sequences[0].status = SequenceStatus.WAITING
    ledger.waits(request, "behind_others", 2.0)
    assert ledger.report("a", 5.0).wait_seconds == {"grammar": 2.0, "behind_others": 3.0}


def test_the_life_of_a_request():
    ledger, request, other = RequestLedger(0.0), make_request(tenant="t", priority=2), make_request("other", tenant="u")
    (sequence,) = request.sequences
    ledger.queued(request, 1.0)
    admit(ledger, sequence, 3.0, CachedPrefix((4, 5), 8, 2, 9))
    sequence.block_table.block_ids = [4, 5, 6]
    sequence.num_computed_tokens = 10
    ledger.first_token(request, 4.0)
    sequence.token_ids += [1, 2]
    report = ledger.report("a", 4.5)
    assert (report.state, report.sequences[0].block_ids, report.num_generated_tokens) == ("running", (4, 5, 6), 2)
    assert (report.ended_time, report.decode_seconds) == (None, None)
    preempt(ledger, sequence, 5.0, other.sequences[0])
    assert ledger.report("a", 5.5).state == "preempted"
    admit(ledger, sequence, 6.5, CachedPrefix((1,), 4, 0, 5))
    ledger.first_token(request, 7.0)
    end(ledger, sequence, 9.0, "length")
    (report,) = ledger.take_ended()
    assert (report.tenant, report.priority, report.state) == ("t", 2, "finished")
    assert (report.num_cached_tokens, report.first_difference) == (8, 9), "of the first admission"
    assert report.wait_seconds == {"behind_others": 2.0, "preempted": 1.5}
    assert (report.queue_seconds, report.prefill_seconds) == (2.0, 1.0)
    assert (report.decode_seconds, report.inference_seconds) == (5.0, 6.0)
    (preemption,) = report.preemptions
    assert (preemption.time, preemption.by_request_id, preemption.by_tenant) == (5.0, "other", "u")
    assert (preemption.num_lost_tokens, preemption.is_swapped, preemption.cause) == (10, False, "kv_blocks")
    assert report.sequences[0].finish_reason == "length"
    assert ledger.report("a", 10.0) is None
    assert ledger.take_ended() == []


def test_what_is_swapped_loses_no_tokens():
    ledger, request = RequestLedger(0.0), make_request()
    (sequence,) = request.sequences
    ledger.queued(request, 0.0)
    admit(ledger, sequence, 0.0)
    sequence.num_computed_tokens = 10
    preempt(ledger, sequence, 1.0, sequence, is_swapped=True)
    sequence.block_table.host_block_ids = [3, 1]
    report = ledger.report("a", 2.0)
    assert (report.preemptions[0].num_lost_tokens, report.preemptions[0].is_swapped) == (0, True)
    assert report.sequences[0].num_host_blocks == 2


def test_a_request_waits_while_any_of_its_sequences_does():
    ledger, request = RequestLedger(0.0), make_request(n=3)
    ledger.queued(request, 0.0)
    admit(ledger, request.sequences[0], 0.0)
    first, second, third = request.sequences[0], *(add_sequence(request, SequenceStatus.RUNNING) for _ in range(2))
    preempt(ledger, second, 1.0, first)
    preempt(ledger, third, 2.0, first)
    admit(ledger, second, 4.0)
    assert ledger.report("a", 4.0).wait_reason == "preempted"
    assert ledger.report("a", 4.0).state == "running"
    end(ledger, third, 6.0, "abort")
    report = ledger.report("a", 8.0)
    assert (report.wait_reason, report.wait_seconds["preempted"]) == (None, 5.0)
    preempt(ledger, second, 8.0, first)
    request.sequences.remove(second)
    ledger.given_up(second, 9.0)
    assert ledger.report("a", 12.0).wait_seconds["preempted"] == 6.0


def test_a_request_ends_with_the_last_of_its_sequences():
    ledger, request = RequestLedger(0.0), make_request(n=2)
    ledger.queued(request, 0.0)
    admit(ledger, request.sequences[0], 0.0)
    add_sequence(request, SequenceStatus.RUNNING)
    end(ledger, request.sequences[1], 1.0, "length")
    assert ledger.take_ended() == []
    end(ledger, request.sequences[0], 2.0)
    (report,) = ledger.take_ended()
    assert [s.finish_reason for s in report.sequences] == ["stop", "length"]
    assert report.ended_time == 2.0


def test_a_request_that_is_aborted_before_its_fork_has_ended():
    ledger, request = RequestLedger(0.0), make_request(n=4)
    ledger.queued(request, 0.0)
    end(ledger, request.sequences[0], 5.0, "abort")
    (report,) = ledger.take_ended()
    assert (report.state, report.wait_seconds, report.admitted_time) == ("finished", {"behind_others": 5.0}, None)
    assert (report.queue_seconds, report.prefill_seconds, report.inference_seconds) == (5.0, None, None)


@pytest.mark.parametrize("was_queued", [True, False])
def test_a_dropped_request_says_why(was_queued):
    ledger, request = RequestLedger(0.0), make_request()
    if was_queued:
        ledger.queued(request, 0.0)
        end(ledger, request.sequences[0], 2.0, "abort")
    ledger.dropped(request, Dropped("a", "queue_timeout", "Too late."), 2.0)
    (report,) = ledger.take_ended()
    assert (report.state, report.drop_cause) == ("dropped", "queue_timeout")
    assert report.queue_seconds == (2.0 if was_queued else 0.0)
    assert ledger.report("a", 3.0) is None


def test_an_id_may_be_used_again_before_its_books_are_taken():
    ledger, first, second = RequestLedger(0.0), make_request(tenant="t"), make_request(tenant="u")
    ledger.queued(first, 0.0)
    end(ledger, first.sequences[0], 1.0)
    ledger.queued(second, 1.5)
    assert [(r.tenant, r.ended_time) for r in ledger.take_ended()] == [("t", 1.0)]
    assert ledger.report("a", 2.0).tenant == "u"
    end(ledger, second.sequences[0], 3.0)
    assert [r.tenant for r in ledger.take_ended()] == ["u"]


def test_reports_are_bounded():
    ledger, request = RequestLedger(0.0), make_request(n=2 * MAX_REPORTED_SEQUENCES)
    ledger.queued(request, 0.0)
    (sequence,) = request.sequences
    for _ in range(2 * MAX_REPORTED_PREEMPTIONS):
        admit(ledger, sequence, 0.0)
        preempt(ledger, sequence, 0.0, sequence)
    for _ in range(2 * MAX_REPORTED_SEQUENCES - 1):
        add_sequence(request)
    sequence.block_table.block_ids = list(range(2 * MAX_REPORTED_BLOCKS))
    report = ledger.report("a", 0.0)
    assert (len(report.preemptions), report.num_preemptions) == (MAX_REPORTED_PREEMPTIONS, 2 * MAX_REPORTED_PREEMPTIONS)
    assert len(report.sequences) == MAX_REPORTED_SEQUENCES
    assert len(report.sequences[0].block_ids) == MAX_REPORTED_BLOCKS
    assert report.sequences[0].num_blocks == 2 * MAX_REPORTED_BLOCKS


EVENTS = st.one_of(
    st.tuples(st.just("queue"), st.just(0)),
    st.tuples(st.sampled_from(["admit", "preempt", "end", "drop"]), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.integers(1, 15)),
)


@given(st.lists(EVENTS, max_size=60))
def test_each_long_wait_is_told_once(events):
    """Against a plain list of who waits since when. Nothing is left of what has ended."""
    patience = 10.0
    ledger, now = RequestLedger(patience), 0.0
    live: list[Request] = []
    waiting: dict[str, float] = {}
    told: set[str] = set()
    num_ended = 0
    for number, (event, value) in enumerate(events):
        chosen = live[value % len(live)] if live and event in ("admit", "preempt", "end", "drop") else None
        if event == "queue":
            request = make_request(f"r{number}")
            live.append(request)
            waiting[request.request_id] = now
            ledger.queued(request, now)
        elif event == "wait":
            now += value
        elif chosen is not None:
            name, (sequence,) = chosen.request_id, chosen.sequences
            if event == "admit":
                admit(ledger, sequence, now)
                waiting.pop(name, None)
                told.discard(name)
            elif event == "preempt" and sequence.status is SequenceStatus.RUNNING:
                preempt(ledger, sequence, now, sequence)
                waiting[name] = now
            elif event in ("end", "drop"):
                end(ledger, sequence, now)
                if event == "drop":
                    ledger.dropped(chosen, Dropped(name, "deadline", ""), now)
                live.remove(chosen)
                waiting.pop(name, None)
                told.discard(name)
                num_ended += 1
        expected = {name: now - since for name, since in waiting.items() if now - since >= patience}
        found = {s.request_id: s.seconds for s in ledger.starving(now)}
        assert found == {name: seconds for name, seconds in expected.items() if name not in told}
        told |= found.keys()
        assert ledger.num_starving == len(expected)
        ledger.check_integrity()
    reports = ledger.take_ended()
    assert len(reports) == num_ended
    assert sum(len(r.wait_seconds) > 0 for r in reports) == num_ended
    for request in live:
        end(ledger, request.sequences[0], now)
    assert len(ledger.take_ended()) == len(live)
    assert ledger.num_starving == 0
    assert vars(ledger) == vars(RequestLedger(patience)), "something is left of requests that have ended"


def test_starvation_says_what_is_waited_for():
    ledger, first, second = RequestLedger(30.0), make_request("a", tenant="t", priority=3), make_request("b")
    ledger.queued(first, 0.0)
    ledger.queued(second, 0.0)
    ledger.waits(first, "kv_blocks", 20.0)
    assert ledger.starving(29.0) == []
    found = ledger.starving(31.0)
    assert [(s.request_id, s.reason, s.seconds, s.priority) for s in found] == [
        ("a", "kv_blocks", 31.0, 3),
        ("b", "behind_others", 31.0, 0),
    ]


def test_nobody_starves_without_a_limit():
    ledger, request = RequestLedger(0.0), make_request()
    ledger.queued(request, 0.0)
    assert ledger.starving(1e9) == []


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_the_scheduler_keeps_its_books(overlapped, num_host_blocks):
    """Tiny pool, shared prompts, forks: the books agree with the tokens, and waits fill the time in the queue."""
    bench = Bench(
        num_blocks=16,
        overlapped=overlapped,
        num_host_blocks=num_host_blocks,
        max_num_seqs=4,
        recompute_seconds_per_token=1.0,
        swap_seconds_per_block=0.001,
    )
    for number in range(12):
        prompt = tuple(range(12)) if number % 2 else tuple(range(number, number + 9))
        bench.add(f"r{number}", prompt=prompt, n=1 + number % 3, max_tokens=20)
        bench.step()
        bench.tick(0.5)
    bench.abort("r11")
    while bench.scheduler.has_unfinished:
        bench.step()
        bench.tick(0.5)
    bench.drain()
    assert bench.reports.keys() == bench.requests.keys()
    for name, report in bench.reports.items():
        request = bench.requests[name]
        assert report.state == "finished"
        assert report.num_generated_tokens == sum(s.num_generated_tokens for s in request.sequences)
        before = sum(seconds for reason, seconds in report.wait_seconds.items() if reason != "preempted")
        assert before >= report.queue_seconds - 1e-6
        if report.num_preemptions == 0 and request.params.n == 1:
            assert before == pytest.approx(report.queue_seconds)
    reports = bench.reports.values()
    assert any(report.num_cached_tokens for report in reports)
    assert sum(report.num_preemptions for report in reports) == bench.scheduler.stats.num_preemptions > 0
    assert any(p.is_swapped for report in reports for p in report.preemptions) == (num_host_blocks > 0)
    assert {reason for report in reports for reason in report.wait_seconds} >= {"behind_others", "kv_blocks"}
    assert vars(bench.scheduler.ledger) == vars(RequestLedger(bench.config.starving_seconds))
