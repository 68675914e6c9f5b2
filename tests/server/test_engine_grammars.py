"""The engine's loop with grammars: compiled while it steps, woken when they are there, refused one by one."""

import queue
import time
from types import SimpleNamespace

import pytest

from paged_cache.manager import BlockManager
from scheduler.admission import RequestRefused
from scheduler.config import SchedulerConfig
from scheduler.sampling_params import SamplingParams, StructuredOutput
from scheduler.scheduler import Scheduler
from server.engine import Engine
from server.engine_process import Inbox, Woken, run_loop
from server.grammar_compilation import GrammarCompilation
from server.messages import Abort, EngineInfo, Rejected, StepUpdates, Submit
from server.token_ids import TokenIds
from tests.scheduler.fake_runner import VOCAB_SIZE, FakeRunner, expected_tokens, fake_vocabulary
from tests.server.doubles import Trials

OBJECT = StructuredOutput("json_object")
CHOICE = StructuredOutput("choice", '["abc", "x"]')


def build(on_grammar=lambda: None, load=fake_vocabulary, trials=None, **settings):
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64), BlockManager(12, 4)
    )
    info = EngineInfo(64, 12, 4, VOCAB_SIZE, "fake", "cpu", "float32", 0.0, 0)
    grammars = GrammarCompilation(load, VOCAB_SIZE, on_grammar, trials or Trials())
    return Engine(scheduler, FakeRunner(4, 4), info, grammars=grammars, **settings)


def params(wanted=None, **fields):
    return SamplingParams(**{"max_tokens": 12, "structured_output": wanted, **fields})


class Edge:
    """The other end of `run_loop`: puts messages in, remembers what comes out, and goes when all has ended."""

    def __init__(self, engine_settings=None):
        self.inbox = Inbox.__new__(Inbox)
        self.inbox._messages = queue.SimpleQueue()
        self.trials = Trials()
        self.engine = build(self.inbox.wake, trials=self.trials, **(engine_settings or {}))
        self.tokens, self.rejected, self.ended = {}, {}, set()
        self.expected = set()

    def submit(self, name, prompt, wanted_params):
        self.expected.add(name)
        self.inbox._messages.put(Submit(name, TokenIds(prompt), wanted_params, 0.0))

    def send(self, message):
        match message:
            case Rejected():
                self.rejected[message.request_id] = message
                self.ended.add(message.request_id)
            case StepUpdates():
                for update in message.updates:
                    self.tokens.setdefault(update.request_id, []).extend(update.token_ids)
                    if update.finish_reason is not None:
                        self.ended.add(update.request_id)
        if self.ended == self.expected:
            self.inbox._messages.put(None)

    def run(self):
        run_loop(self.engine, self.inbox, SimpleNamespace(send=self.send))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_structured_requests_run_beside_others_and_give_what_each_gives_alone(async_scheduling):
    edge = Edge({"async_scheduling": async_scheduling})
    requests = {
        "plain": ([1, 2, 3], params(seed=1)),
        "object": ([4, 5], params(OBJECT, seed=2)),
        "choice": ([6] * 9, params(CHOICE, seed=3)),
        "again": ([7], params(CHOICE, seed=4)),
    }
    for name, (prompt, wanted) in requests.items():
        edge.submit(name, prompt, wanted)
    edge.run()
    for name, (prompt, wanted) in requests.items():
        assert edge.tokens[name] == expected_tokens(prompt, wanted, 0, frozenset()), name
    assert edge.engine.stats.num_used_blocks == 0


def test_an_idle_engine_is_woken_by_a_grammar_and_does_not_wait_for_its_heartbeat():
    waits = []
    edge = Edge()
    take = edge.inbox.take

    def watched_take(timeout):
        message = take(timeout)
        waits.append(message)
        return message

    edge.inbox.take = watched_take
    edge.submit("a", [1], params(CHOICE))
    edge.run()
    assert any(isinstance(message, Woken) for message in waits)


def test_what_cannot_be_compiled_is_rejected_and_the_others_run_on():
    edge = Edge()
    edge.submit("bad", [1], params(StructuredOutput("regex", "(", param="guided_regex")))
    edge.submit("good", [1], params(CHOICE))
    edge.run()
    assert edge.rejected.keys() == {"bad"}
    assert edge.rejected["bad"].param == "guided_regex"
    assert not edge.rejected["bad"].is_shortage
    assert edge.trials.is_closed
    assert edge.tokens["good"] == expected_tokens([1], params(CHOICE), 0, frozenset())
    assert edge.engine.stats.num_waiting == 0


def test_a_shortage_is_rejected_as_one():
    edge = Edge()
    edge.trials._refuse, edge.trials.is_shortage = (lambda wanted: "busy"), True
    edge.submit("a", [1], params(CHOICE))
    edge.run()
    assert (edge.rejected["a"].is_shortage, edge.rejected["a"].param) == (True, None)


def test_an_abort_while_the_grammar_is_made_ends_the_request():
    engine = build(load=lambda: time.sleep(0.05) or fake_vocabulary())
    engine.submit(Submit("a", TokenIds([1]), params(OBJECT), 0.0))
    assert engine.stats.num_waiting == 1
    engine.abort(Abort("a").request_id, None)
    assert engine.stats.num_waiting == 0
    time.sleep(0.1)
    assert engine.take_rejected() == []
    assert not engine._grammars._open
    assert not engine.has_unfinished


def test_a_refused_request_asks_for_no_grammar():
    engine = build(load=lambda: pytest.fail("a vocabulary was loaded"))
    with pytest.raises(RequestRefused):
        engine.submit(Submit("a", TokenIds([1]), params(OBJECT, max_tokens=1000), 0.0))
    with pytest.raises(RequestRefused):
        engine.submit(Submit("a", TokenIds([VOCAB_SIZE]), params(OBJECT), 0.0))
    assert engine.take_rejected() == []


def test_an_engine_without_a_vocabulary_refuses_structured_output():
    engine = build()
    engine._grammars = None
    with pytest.raises(RequestRefused, match="structured_outputs is not supported"):
        engine.submit(Submit("a", TokenIds([1]), params(OBJECT), 0.0))
