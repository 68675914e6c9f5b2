"""Grammars that would end, stop or fill the engine: each is refused, by a process that goes on with the next one."""

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scheduler.sampling_params import StructuredOutput
from server import grammar_trial_process, grammar_trials
from server.grammar_compilation import GrammarCompilation
from server.grammar_trial_process import BUSY, FAILS, TOO_LARGE, TOO_SLOW, Outcome, TrialLimits, try_out
from server.grammar_trials import NUM_AT_ONCE, GrammarTrials, TrialLost
from server.ipc import MessageCodec
from tests.server.doubles import bytes_vocabulary

LIMITS = TrialLimits(cpu_seconds=0.5)
DIGITS = StructuredOutput("regex", r"\d+")


@pytest.fixture(scope="module")
def trials():
    trials = GrammarTrials(bytes_vocabulary(), 256, LIMITS)
    yield trials
    trials.close()


def schema(value):
    return StructuredOutput("json_schema", json.dumps(value))


def lark(text):
    return StructuredOutput("grammar", text)


def chained_definitions(length):
    links = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)}
    return schema({"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "integer"}}})


def chained_rules(letter, length):
    links = "".join(f"{letter}{i}: {letter}{i + 1}\n" for i in range(length))
    return lark(f'start: {letter}0\n{links}{letter}{length}: "a"\n')


def intersection(first, length=300):
    return lark("start: T\nT: " + " & ".join(f"/.*{first + i}.*/" for i in range(length)))


def multiple(of):
    return schema({"type": "integer", "multipleOf": of, "minimum": 0, "maximum": 10**15})


@pytest.mark.parametrize(
    ("wanted", "refusals"),
    [
        (chained_definitions(1200), {TOO_LARGE}),  # each of these would overflow the stack
        (chained_rules("r", 4000), {TOO_LARGE}),
        (chained_rules("T", 4000), {TOO_LARGE}),
        (intersection(0), {TOO_SLOW, TOO_LARGE}),  # which of the two depends on the machine
        (multiple(1000003), {TOO_SLOW, TOO_LARGE}),
        (lark('start: x "a"\nx[lazy]: /.*/'), {"the grammar library fails on it"}),
    ],
    ids=["definitions", "rules", "terminals", "intersection", "multiple", "panic"],
)
def test_what_would_harm_the_engine_is_refused_and_the_next_one_is_tried(trials, wanted, refusals):
    assert trials.try_out(wanted).refusal in refusals
    assert trials.try_out(StructuredOutput("regex", f"[{wanted.value[0]}]x")).refusal is None


@pytest.mark.parametrize(
    "wanted",
    [
        DIGITS,
        StructuredOutput("json_object"),
        chained_definitions(30),
        chained_rules("r", 50),
        schema({"const": "lorem ipsum " * 6000}),
        multiple(7),
        StructuredOutput("choice", json.dumps([f"{number:060}" for number in range(1000)])),
        StructuredOutput("regex", "(x|y)(z\x04w)|ok"),
    ],
)
def test_what_can_be_followed_is_not_refused(trials, wanted):
    assert trials.try_out(wanted).refusal is None


def test_a_refusal_by_the_library_keeps_its_words(trials):
    assert "unclosed group" in trials.try_out(StructuredOutput("regex", "(")).refusal
    assert "uniqueItems" in trials.try_out(schema({"items": {"uniqueItems": True}})).refusal


@pytest.mark.parametrize(
    ("limits", "wanted", "refusal"),
    [
        (TrialLimits(kept_bytes=10 << 20), multiple(99991), TOO_LARGE),
        (TrialLimits(address_bytes=16 << 20), schema({"const": "lorem ipsum " * 6000}), TOO_LARGE),
        (TrialLimits(cpu_seconds=0.1), intersection(0), TOO_SLOW),
        (TrialLimits(wall_seconds=0.1), intersection(0), BUSY),
    ],
    ids=["kept", "address", "cpu", "wall"],
)
def test_each_limit_holds(limits, wanted, refusal):
    trials = GrammarTrials(bytes_vocabulary(), 256, limits)
    try:
        outcome = trials.try_out(wanted)
        assert (outcome.refusal, outcome.is_shortage) == (refusal, refusal == BUSY)
        assert bool(trials._outcomes) == (refusal != BUSY)  # what is not its own doing is not remembered
        assert trials.try_out(DIGITS).refusal is None
    finally:
        trials.close()


class Stub:
    """A compiler to which something happens in the copy of this process that it is tried out in."""

    def __init__(self, happen):
        self.compile = lambda wanted: happen()


def panic():
    raise type("Panic", (BaseException,), {})


def fail(error):
    raise error


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("happen", "outcome"),
    [
        (panic, Outcome(FAILS)),
        (lambda: fail(KeyError()), Outcome(FAILS)),
        (lambda: fail(RecursionError()), Outcome(TOO_LARGE)),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), Outcome(BUSY, is_shortage=True)),
        (lambda: os._exit(0), Outcome(BUSY, is_shortage=True)),
    ],
    ids=["panic", "error", "recursion", "killed", "silent"],
)
def test_whatever_happens_on_trial_is_no_pass(happen, outcome):
    assert try_out(Stub(happen), DIGITS, TrialLimits()) == outcome


def test_a_worker_whose_engine_goes_during_a_trial_ends_in_peace(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(grammar_trial_process, "try_out", lambda *_: ours.close() or Outcome(None))
    ours.sendall(MessageCodec(None).encode(DIGITS))
    with theirs:
        grammar_trial_process._serve(theirs, None, LIMITS)


def test_what_has_become_of_a_grammar_is_remembered_for_all_who_ask_for_the_same(trials, monkeypatch):
    asked = []
    ask = trials._ask
    monkeypatch.setattr(trials, "_ask", lambda wanted: asked.append(wanted) or time.sleep(0.05) or ask(wanted))
    wanted = [StructuredOutput("json_object", "", " ?", param=f"field_{number}") for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert {outcome.refusal for outcome in threads.map(trials.try_out, wanted)} == {None}
    assert len(asked) == 1
    assert trials.try_out(StructuredOutput("json_object", "", " {2}")).refusal is None  # another one
    assert len(asked) == 2
    for _ in range(2):
        assert trials.try_out(StructuredOutput("regex", "[")).refusal is not None
    assert len(asked) == 3


def test_a_slow_grammar_holds_up_no_other(trials):
    thread = threading.Thread(target=trials.try_out, args=(intersection(1000),))
    thread.start()
    for number in range(5):
        assert trials.try_out(StructuredOutput("regex", f"x{number}")).refusal is None
    assert thread.is_alive()
    thread.join()


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_process_that_is_gone_is_replaced_and_one_that_is_closed_is_not():
    trials = GrammarTrials(bytes_vocabulary(), 256)
    assert trials.try_out(DIGITS).refusal is None
    first = trials._process._popen.pid
    workers = children_of(first)
    assert len(workers) == NUM_AT_ONCE
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    assert trials.try_out(StructuredOutput("regex", "a")).refusal is None
    second = trials._process._popen.pid
    assert second != first
    workers = children_of(second)
    process = trials._process
    trials.close()
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert {connection.fileno() for connection in process._connections} == {-1}
    with pytest.raises(TrialLost):
        trials.try_out(StructuredOutput("regex", "b"))


def test_an_answer_that_comes_late_is_taken_for_no_other_and_what_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(grammar_trials, "_END_SECONDS", 0.2)
    trials = GrammarTrials(bytes_vocabulary(), 256)
    trials.try_out(DIGITS)
    process = trials._process
    workers = children_of(process._popen.pid)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    for connection in process._connections:
        connection.settimeout(0.05)
    for _ in workers:
        with pytest.raises(TrialLost):
            process.ask(StructuredOutput("regex", "("))
    os.kill(workers[0], signal.SIGCONT)
    for connection in process._connections:
        connection.settimeout(5)
    for _ in workers:
        with pytest.raises(TrialLost):
            process.ask(DIGITS)
    trials.close()
    assert process._popen.returncode == -signal.SIGKILL


def test_requests_for_harmful_grammars_are_refused_while_others_are_served(trials):
    done = threading.Semaphore(0)
    compilation = GrammarCompilation(bytes_vocabulary, 256, done.release, lambda *_: trials)
    bad = [chained_definitions(1201), chained_rules("r", 4001), intersection(2000), intersection(3000)]
    for number, wanted in enumerate(bad * 2):
        compilation.request(f"bad {number}", wanted)
    compilation.request("good", DIGITS)
    for _ in range(len(bad) * 2 + 1):
        assert done.acquire(timeout=30)
    finished = {grammar.request_id: grammar for grammar in compilation.take_finished()}
    assert finished.pop("good").state.accept(ord("1"))
    assert {grammar.message.split(": ")[1].rstrip(".") for grammar in finished.values()} <= {TOO_LARGE, TOO_SLOW}
    assert len(finished) == len(bad) * 2
