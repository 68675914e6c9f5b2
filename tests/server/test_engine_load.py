"""The engine under more than it can serve: what it ends and says of it, how it times its load, whom it reports."""

import logging
import queue
import time
from types import SimpleNamespace

import pytest

from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.request_report import Starvation
from scheduler.sampling_params import BeamSearch, SamplingParams, StructuredOutput
from scheduler.scheduler import Scheduler
from server.engine import Engine
from server.engine_load import EngineLoad, log_starving
from server.engine_process import Inbox, run_loop
from server.messages import EngineInfo, Inspect, Inspection, Rejected, StepUpdates, Submit
from server.token_ids import TokenIds
from tests.scheduler.fake_runner import VOCAB_SIZE, FakeRunner, expected_tokens

START = 1_000_000.0


class Clock:
    """Seconds since the epoch, which pass with each step alone."""

    def __init__(self):
        self.now = START

    def __call__(self):
        return self.now


class SlowGrammars:
    """In place of the compilation: remembers what it is asked for, and never comes to an end."""

    def __init__(self):
        self.requested, self.given_up = [], []

    def request(self, request_id, wanted):
        self.requested.append(request_id)

    def give_up(self, request_id):
        self.given_up.append(request_id)

    def take_finished(self):
        return []


class TimedRunner(FakeRunner):
    """Each step takes a tenth of a second."""

    clock = None

    def launch(self, output):
        pending = super().launch(output)
        self.clock.now += 0.1
        return pending


def build(clock, *, grammars=None, **limits):
    bounds = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, **limits}
    scheduler = Scheduler(SchedulerConfig(**bounds), BlockManager(8, 4))
    runner = TimedRunner(4, bounds["max_num_seqs"])
    runner.clock = clock
    info = EngineInfo(64, 8, 4, VOCAB_SIZE, "fake", "cpu", "float32", 0.0, 0)
    return Engine(scheduler, runner, info, clock=clock, grammars=grammars)


def submit(engine, name, num_tokens=8, max_tokens=4, *, arrival_time=START, structured_output=None, **terms):
    params = SamplingParams(max_tokens=max_tokens, seed=1, structured_output=structured_output)
    engine.submit(Submit(name, TokenIds(range(num_tokens)), params, arrival_time, **terms))


def run(engine, max_steps=200):
    tokens, rejected = {}, []
    for _ in range(max_steps):
        rejected += engine.take_rejected()
        if not engine.has_unfinished:
            return tokens, {each.request_id: each for each in rejected}
        for update in engine.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
    raise AssertionError("it does not end")


def test_of_ten_times_what_fits_all_that_is_not_refused_is_served_whole():
    engine = build(Clock(), max_queued_requests=3)
    for number in range(50):
        submit(engine, f"r{number}")
    tokens, rejected = run(engine)
    assert len(tokens) == 5  # two slots, and three places in the queue
    assert tokens.keys() | rejected.keys() == {f"r{number}" for number in range(50)}
    expected = expected_tokens(list(range(8)), SamplingParams(max_tokens=4, seed=1), 0, frozenset())
    assert all(each == expected for each in tokens.values())
    assert {each.cause for each in rejected.values()} == {"queue_full"}
    assert all(each.is_shortage and each.param is None for each in rejected.values())
    assert engine.stats.num_dropped_queue_full == 45


def test_the_time_to_come_again_follows_from_measured_steps():
    """12 tokens in 0.6 s a request alone, and two run at once: the wait is what the speed makes of the queue."""
    clock = Clock()
    engine = build(clock, max_queued_requests=4)
    submit(engine, "first")
    assert engine.stats.queue_seconds is None  # nothing was timed
    run(engine)
    engine.take_reports()
    for number in range(7):
        submit(engine, f"r{number}")
    (rejected,) = engine.take_rejected()
    started = clock.now
    stats = engine.stats
    assert rejected.retry_after == pytest.approx(stats.queue_seconds, rel=0.5)
    run(engine)
    # As slow as the one request alone was; together they are up to twice as fast.
    assert 1 <= stats.queue_seconds / (clock.now - started) <= 2.5


def test_answers_that_are_complete_tell_how_long_those_to_come_will_be():
    engine = build(Clock())
    submit(engine, "a", max_tokens=20)
    run(engine)
    submit(engine, "b")
    before = engine.stats.queue_seconds
    engine.take_reports()
    # The tokens of its prompt, and as many as the first answer had.
    assert engine.stats.queue_seconds == pytest.approx(before * (8 + 20) / 8)


def test_idle_time_does_not_count_as_slowness():
    clock = Clock()
    engine = build(clock)
    for name in "ab":
        submit(engine, name)
        run(engine)
        clock.now += 1000
    submit(engine, "c")
    assert engine.stats.queue_seconds < 10


@pytest.mark.parametrize("ends_by", ["abort", "deadline"])
def test_idle_time_does_not_count_after_a_request_that_no_last_step_ended(ends_by):
    clock = Clock()
    engine = build(clock)
    submit(engine, "leaves", max_tokens=20, deadline=START + 0.35 if ends_by == "deadline" else None)
    for _ in range(4):
        engine.step()
    if ends_by == "abort":
        engine.abort("leaves", None)
    engine.take_rejected()
    assert not engine.has_unfinished
    clock.now += 1000
    submit(engine, "b")
    engine.step()
    submit(engine, "c")
    assert engine.stats.queue_seconds < 10


def test_whose_time_is_over_is_ended_before_any_work_or_in_the_middle_of_it():
    clock = Clock()
    engine = build(clock)
    submit(engine, "late", deadline=START - 1)
    submit(engine, "runs", 8, 12)
    submit(engine, "runs-too", 8, 12, deadline=START + 0.55)
    submit(engine, "waits", queue_deadline=START + 0.25)
    tokens, rejected = run(engine)
    assert {name: each.cause for name, each in rejected.items()} == {
        "late": "deadline",
        "runs-too": "deadline",
        "waits": "queue_timeout",
    }
    assert "late" not in tokens
    assert "waits" not in tokens
    assert 0 < len(tokens["runs-too"]) < 12
    assert len(tokens["runs"]) == 12
    engine.check_integrity()
    assert engine.stats.num_integrity_failures == 0
    assert engine.stats.num_used_blocks == 0


def test_the_time_of_who_waits_for_a_grammar_passes_without_steps_and_the_grammar_is_given_up():
    clock, grammars = Clock(), SlowGrammars()
    engine = build(clock, grammars=grammars)
    submit(engine, "r", structured_output=StructuredOutput("json_object"), queue_deadline=START + 5)
    assert not engine.has_unfinished
    assert engine.take_rejected() == []
    clock.now += 6
    (rejected,) = engine.take_rejected()
    assert (rejected.request_id, rejected.cause) == ("r", "queue_timeout")
    assert grammars.given_up == ["r"]


def test_no_grammar_is_compiled_for_a_request_that_finds_no_room():
    grammars = SlowGrammars()
    engine = build(Clock(), grammars=grammars, max_queued_requests=1)
    for number in range(5):
        submit(engine, f"r{number}", structured_output=StructuredOutput("json_object"))
    assert [each.request_id for each in engine.take_rejected()] == ["r3", "r4"]
    assert grammars.requested == ["r0", "r1", "r2"]


class RestlessClock(Clock):
    """Time passes between any two looks at it, so that a deadline may come anywhere in the loop."""

    def __call__(self):
        self.now += 0.01
        return self.now


@pytest.mark.parametrize("seconds", [0.01 * number for number in range(1, 40)])
def test_the_loop_tells_of_drops_and_ends_without_waiting_for_its_heartbeat(monkeypatch, seconds):
    monkeypatch.setattr("server.engine_process.HEARTBEAT_SECONDS", 30.0)
    engine = build(RestlessClock())
    inbox = Inbox.__new__(Inbox)
    inbox._messages = queue.SimpleQueue()
    sent = []

    def send(message):
        sent.append(message)
        if isinstance(message, Rejected):
            inbox._messages.put(Inspect(7, ["runs", "unknown"]))
        if isinstance(message, Inspection):
            inbox._messages.put(None)

    params = SamplingParams(max_tokens=12)
    inbox._messages.put(Submit("runs", TokenIds(range(8)), params, START, deadline=START + seconds))
    started = time.monotonic()
    run_loop(engine, inbox, SimpleNamespace(send=send))
    assert time.monotonic() - started < 10
    (rejected,) = [message for message in sent if isinstance(message, Rejected)]
    assert (rejected.request_id, rejected.cause) == ("runs", "deadline")
    reports = [report for message in sent if isinstance(message, StepUpdates) for report in message.reports]
    assert [(report.request_id, report.drop_cause) for report in reports] == [("runs", "deadline")]
    assert sent[-1].number == 7


def test_beams_that_take_turns_at_the_places_are_not_said_to_want_blocks():
    engine = build(Clock(), max_num_seqs=1)
    params = SamplingParams(max_tokens=4, temperature=0.0, beam_search=BeamSearch(2, 1.0, False))
    engine.submit(Submit("b", TokenIds(range(3)), params, START))  # two beams of two blocks, of eight
    tokens, _ = run(engine)
    assert tokens["b"]
    (report,) = engine.take_reports()
    assert {preemption.cause for preemption in report.preemptions} == {"max_num_seqs"}
    assert report.wait_seconds.get("max_num_seqs", 0.0) > 0
    assert not report.wait_seconds.get("kv_blocks")


class Flood:
    """An inbox in which the next request always waits already; each takes a millisecond to be read."""

    def __init__(self, clock, num_messages):
        self.clock, self.num_left = clock, num_messages

    def take(self, timeout):
        if not self.num_left:
            raise ConnectionError
        self.num_left -= 1
        self.clock.now += 0.001
        return Submit(f"r{self.num_left}", TokenIds(range(8)), SamplingParams(max_tokens=4), self.clock.now)


def test_steps_get_their_part_of_the_time_in_a_flood_of_requests_that_find_no_room(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("server.engine_process.time", SimpleNamespace(monotonic=clock))
    engine = build(clock, max_queued_requests=4)
    run_loop(engine, Flood(clock, 5000), SimpleNamespace(send=lambda message: None))
    # A step takes 0.1 s and so many messages as well: 5 s of them leave room for some 50 steps.
    assert 40 <= engine.stats.num_steps <= 60


def test_those_who_wait_too_long_are_named_once_with_the_reason(caplog):
    clock = Clock()
    engine = build(clock, starving_seconds=0.9, max_num_seqs=1)
    submit(engine, "runs", 8, 20)
    submit(engine, "waits", tenant="ann", priority=3)
    with caplog.at_level(logging.WARNING):
        run(engine)
    (line,) = caplog.messages
    assert "waits of ann (priority 3) has waited for 1 s" in line
    assert "--max-num-seqs" in line


def test_the_log_of_those_who_wait_stays_short(caplog):
    with caplog.at_level(logging.WARNING):
        log_starving([Starvation(f"r{i}", "", 0, "kv_blocks", 61.0) for i in range(1000)])
    assert len(caplog.messages) == 9
    assert "992 more" in caplog.messages[-1]


def test_the_load_learns_from_answers_that_were_complete():
    load = EngineLoad()
    load.begins_step(0.0)
    load.ends_step(100, 1.0, is_last=False)
    stats = SimpleNamespace(num_queued_tokens=200, num_waiting=10)
    assert load.seconds_until_served(stats) == pytest.approx(2)
    ended = SimpleNamespace(state="finished", num_generated_tokens=30)
    load.take([ended, SimpleNamespace(state="dropped", num_generated_tokens=0)])
    assert load.seconds_until_served(stats) == pytest.approx(5)
