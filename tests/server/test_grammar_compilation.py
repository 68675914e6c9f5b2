"""Compiling beside the step loop: each request its own grammar, with an end to waiting whatever a grammar does."""

import gc
import threading
import time
import weakref
from contextlib import suppress
from random import Random

import llguidance
import pytest

from scheduler.grammar import GrammarCompiler, GrammarError, GrammarState
from scheduler.sampling_params import StructuredOutput
from server import grammar_compilation
from server.grammar_compilation import GrammarCompilation
from server.grammar_trials import NUM_AT_ONCE, TrialLost
from server.tokenizer import TokenizerError
from tests.server.doubles import Trials, bytes_vocabulary

DIGITS = StructuredOutput("regex", r"\d+")


class Bench:
    """A compilation whose results can be waited for; counts what is loaded, tried out and compiled."""

    def __init__(self, monkeypatch, load=bytes_vocabulary, before=lambda wanted: None, refuse=lambda wanted: None):
        self.num_loaded = 0
        self.compiled = []
        self.done = threading.Semaphore(0)
        self.trials = Trials(refuse)
        compile_ = GrammarCompiler.compile

        def counted_load():
            self.num_loaded += 1
            return load()

        def counted_compile(compiler, wanted):
            self.compiled.append(wanted.value)
            before(wanted)
            return compile_(compiler, wanted)

        monkeypatch.setattr(GrammarCompiler, "compile", counted_compile)
        self.compilation = GrammarCompilation(counted_load, 256, self.done.release, self.trials)

    def wait(self, num_grammars=1):
        for _ in range(num_grammars):
            assert self.done.acquire(timeout=20)

    def finish(self, num_grammars=1):
        """Everything that has come to an end after so many grammars have."""
        self.wait(num_grammars)
        return {grammar.request_id: grammar for grammar in self.compilation.take_finished()}


def test_each_request_has_a_grammar_of_its_own_and_the_vocabulary_is_loaded_once(monkeypatch):
    bench = Bench(monkeypatch)
    for name in "abc":
        bench.compilation.request(name, DIGITS)
    finished = bench.finish(3)
    assert sorted(finished) == ["a", "b", "c"]
    assert finished["a"].state.accept(ord("1"))
    assert not finished["b"].state.may_end
    assert (bench.num_loaded, bench.compiled) == (1, [r"\d+"] * 3)
    assert bench.compilation.take_finished() == []


def test_what_one_request_does_with_a_grammar_spoils_it_for_no_other(monkeypatch):
    limits = llguidance.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr("scheduler.grammar._limits", lambda: limits)
    bench = Bench(monkeypatch)
    wanted = StructuredOutput("regex", r"ok;|[^o].*a.{200}b.*c.{200}d")
    rng = Random(0)
    for number in range(3):
        bench.compilation.request("wild", wanted)
        wild = bench.finish()["wild"].state
        while any(wild.bitmask()):
            assert wild.accept(ord(rng.choice("xab")))
        assert wild.is_too_costly
        bench.compilation.request("calm", wanted)
        calm = bench.finish()["calm"].state
        for byte in b"ok;":
            assert any(calm.bitmask()), number
            assert calm.accept(byte)
        assert calm.is_complete


def test_a_grammar_that_was_refused_on_trial_is_not_compiled(monkeypatch):
    bench = Bench(monkeypatch, refuse=lambda wanted: "it is too large" if wanted.value == "b" else None)
    for name in "ab":
        bench.compilation.request(name, StructuredOutput("regex", name, param="guided_regex"))
    finished = bench.finish(2)
    assert finished["a"].state is not None
    assert finished["b"].message == "guided_regex cannot be followed: it is too large."
    assert not finished["b"].is_shortage
    assert bench.compiled == ["a"]
    bench.trials.is_shortage = True
    bench.compilation.request("b", StructuredOutput("regex", "b", param="guided_regex"))
    busy = bench.finish()["b"]
    assert (busy.is_shortage, busy.param) == (True, None)


def test_a_grammar_that_cannot_be_compiled_is_refused_to_each_by_its_own_field(monkeypatch):
    bench = Bench(monkeypatch)
    for name in "ab":
        bench.compilation.request(name, StructuredOutput("regex", "(", param=f"field_{name}"))
    finished = bench.finish(2)
    for name in "ab":
        assert finished[name].state is None
        assert finished[name].param == f"field_{name}"
        assert finished[name].message.startswith(f"field_{name} cannot be followed: ")
    bench.compilation.request("good", DIGITS)
    assert bench.finish()["good"].state is not None


class Panic(BaseException):
    """As the library's binding raises it."""


@pytest.mark.parametrize("place", ["refuse", "before"])  # on trial, and while compiling
@pytest.mark.parametrize("error", [RuntimeError("not foreseen"), Panic(), MemoryError(), TrialLost(), OSError()])
def test_whatever_goes_wrong_in_a_thread_ends_the_request_and_not_the_thread(monkeypatch, place, error):
    def fail(wanted):
        if wanted.value == "bad":
            raise error

    bench = Bench(monkeypatch, **{place: fail})
    for number in range(NUM_AT_ONCE + 1):  # more than there are threads
        bench.compilation.request(f"bad {number}", StructuredOutput("regex", "bad"))
        finished = bench.finish()[f"bad {number}"]
        assert (finished.is_shortage, finished.param) == (True, None)
        assert "Send it again later" in finished.message
    bench.compilation.request("good", DIGITS)
    assert bench.finish()["good"].state is not None


def test_the_memory_of_large_grammars_is_bounded_and_comes_back_with_the_last_fork(monkeypatch):
    monkeypatch.setattr(grammar_compilation, "_LARGE_BYTES", 25 << 20)
    bench = Bench(monkeypatch)

    def state_of(num_mib):
        bench.trials.num_bytes = num_mib << 20
        bench.compilation.request("a", DIGITS)
        [finished] = bench.finish().values()
        assert (finished.state is None) == ("taken the memory" in finished.message) == finished.is_shortage
        return finished.state

    kept = [state_of(10), state_of(10)]
    assert None not in kept
    assert state_of(10) is None
    assert state_of(4) is not None
    fork = kept.pop().fork()
    assert state_of(10) is None
    fork.accept(ord("1"))
    del fork
    assert state_of(10) is not None


@pytest.mark.parametrize("slow", ["trial", "compile"])
def test_one_that_takes_too_long_is_given_up_and_holds_up_no_other(monkeypatch, slow):
    go_on, begun = threading.Event(), threading.Event()

    def hold(wanted):
        if wanted.value == "slow":
            begun.set()
            go_on.wait(20)

    bench = Bench(monkeypatch, **{"refuse" if slow == "trial" else "before": hold})
    bench.compilation.request("slow", StructuredOutput("regex", "slow", param="guided_regex"))
    assert begun.wait(20)
    bench.compilation.request("other", DIGITS)
    assert bench.finish()["other"].state is not None
    monkeypatch.setattr(grammar_compilation, "MAX_SECONDS", 0.0)
    [given_up] = bench.compilation.take_finished()
    assert (given_up.request_id, given_up.param, given_up.is_shortage) == ("slow", None, True)
    assert "it takes more than" in given_up.message
    go_on.set()
    bench.wait()  # it ends after all, and nobody hears of it
    assert bench.compilation.take_finished() == []


def test_waiting_for_a_turn_has_an_end_of_its_own(monkeypatch):
    go_on = threading.Event()
    bench = Bench(monkeypatch, before=lambda wanted: wanted.value != "waits" and go_on.wait(20))
    for number in range(NUM_AT_ONCE):
        bench.compilation.request(f"slow {number}", StructuredOutput("regex", f"{number}"))
    while len(bench.compiled) < NUM_AT_ONCE:
        time.sleep(0.01)
    bench.compilation.request("waits", StructuredOutput("regex", "waits"))
    monkeypatch.setattr(grammar_compilation, "MAX_SECONDS", 0.0)
    given_up = {grammar.request_id: grammar for grammar in bench.compilation.take_finished()}
    assert len(given_up) == NUM_AT_ONCE + 1
    assert "its turn has not come" in given_up["waits"].message
    assert given_up["waits"].is_shortage
    go_on.set()
    bench.wait(NUM_AT_ONCE)
    monkeypatch.undo()
    bench.compilation.request("next", DIGITS)
    assert bench.finish().keys() == {"next"}
    assert "waits" not in bench.compiled  # nor is it compiled for nobody


def test_the_prompts_of_one_request_do_not_keep_the_others_waiting(monkeypatch):
    go_on = threading.Event()
    bench = Bench(monkeypatch, before=lambda wanted: wanted.value == "slow" and go_on.wait(20))
    for number in range(3 * NUM_AT_ONCE):
        bench.compilation.request(f"many-{number}", StructuredOutput("regex", "slow"))
    for name in ("few-0", "few-1"):
        bench.compilation.request(name, DIGITS)
    assert bench.finish(2).keys() == {"few-0", "few-1"}
    bench.compilation.give_up("many-5")
    go_on.set()
    finished = bench.finish(3 * NUM_AT_ONCE - 1)
    assert len(finished) == 3 * NUM_AT_ONCE - 1
    assert "many-5" not in finished


def test_what_nobody_waits_for_is_not_kept(monkeypatch):
    states = weakref.WeakSet()

    class Watched(GrammarState):
        __slots__ = ("__weakref__",)

        def __init__(self, *arguments):
            super().__init__(*arguments)
            states.add(self)

    monkeypatch.setattr("scheduler.grammar.GrammarState", Watched)
    go_on = threading.Event()
    bench = Bench(monkeypatch, before=lambda wanted: go_on.wait(20))
    bench.compilation.request("a", DIGITS)
    bench.compilation.give_up("a")
    bench.compilation.give_up("unknown")
    bench.compilation.request("b", DIGITS)
    go_on.set()
    while len(bench.compiled) < 1:
        time.sleep(0.01)
    [finished] = bench.finish(len(bench.compiled)).values()
    assert finished.request_id == "b"
    del finished
    gc.collect()
    assert len(states) == 0


def test_a_vocabulary_that_cannot_be_read_fails_the_request(monkeypatch):
    def load():
        raise TokenizerError("no such file")

    bench = Bench(monkeypatch, load=load)
    bench.compilation.request("a", DIGITS)
    finished = bench.finish()["a"]
    assert "vocabulary cannot be read" in finished.message
    assert finished.is_shortage


def test_the_library_lets_other_threads_run_while_it_compiles():
    compiler = GrammarCompiler(bytes_vocabulary(), 256)
    properties = ",".join(f'"p{i}":{{"type":"integer"}}' for i in range(2500))
    wanted = StructuredOutput("json_schema", f'{{"type":"object","properties":{{{properties}}}}}')
    ended = threading.Event()

    def work():
        with suppress(GrammarError):  # it may be found too large in the end
            compiler.compile(wanted)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    num_turns = 0
    while not ended.is_set() and thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    thread.join()
    assert num_turns > 5
