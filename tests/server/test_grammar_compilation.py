"""Compiling beside the step loop: once for each grammar, with an end to waiting whatever a grammar does."""

import threading
import time
from contextlib import suppress

import llguidance

from scheduler import grammar as grammar_module
from scheduler.grammar import GrammarCompiler, GrammarError, Vocabulary
from scheduler.sampling_params import StructuredOutput
from server import grammar_compilation
from server.grammar_compilation import GrammarCompilation
from server.tokenizer import TokenizerError
from tests.scheduler.fake_runner import allowed_tokens

DIGITS = StructuredOutput("regex", r"\d+")


def bytes_vocabulary():
    return Vocabulary([bytes([byte]) for byte in range(256)], (), lambda text: list(text.encode()))


class Bench:
    """A compilation whose results can be waited for; counts what is loaded and compiled."""

    def __init__(self, monkeypatch, load=bytes_vocabulary, before=lambda wanted: None):
        self.num_loaded = 0
        self.compiled = []
        self.done = threading.Semaphore(0)
        compile_ = GrammarCompiler.compile

        def counted_load():
            self.num_loaded += 1
            return load()

        def counted_compile(compiler, wanted):
            self.compiled.append(wanted.value)
            before(wanted)
            return compile_(compiler, wanted)

        monkeypatch.setattr(GrammarCompiler, "compile", counted_compile)
        self.compilation = GrammarCompilation(counted_load, 256, self.done.release)

    def finish(self, num_grammars=1):
        """Everything that has come to an end after so many grammars have."""
        for _ in range(num_grammars):
            assert self.done.acquire(timeout=20)
        return {grammar.request_id: grammar for grammar in self.compilation.take_finished()}


def test_the_first_request_waits_and_the_next_for_the_same_grammar_does_not(monkeypatch):
    bench = Bench(monkeypatch)
    assert bench.compilation.request("a", DIGITS) is None
    first = bench.finish()["a"]
    second = bench.compilation.request("b", StructuredOutput("regex", r"\d+", param="guided_regex"))
    assert first.state.accept(ord("1"))
    assert not second.state.may_end  # each has a state of its own
    assert second.state.accept(ord("1"))
    assert not bench.compilation.request("c", DIGITS).state.may_end
    assert (bench.num_loaded, bench.compiled) == (1, [r"\d+"])
    assert bench.compilation.take_finished() == []


def test_a_grammar_that_one_request_has_used_up_is_compiled_anew_for_the_next(monkeypatch):
    limits = llguidance.LLParserLimits(verbose_errors=False, step_lexer_fuel=300)
    monkeypatch.setattr(grammar_module, "_limits", lambda: limits)
    bench = Bench(monkeypatch)
    costly = StructuredOutput("regex", "(a|b)*a(a|b){50}c")
    assert bench.compilation.request("a", costly) is None
    state = bench.finish()["a"].state
    while allowed := allowed_tokens(state.bitmask()):
        state.accept(allowed[0])
    assert state.is_too_costly
    assert bench.compilation.request("b", costly) is None
    assert any(bench.finish()["b"].state.bitmask())
    assert bench.compiled == [costly.value] * 2


def test_requests_for_a_grammar_that_is_being_compiled_share_it(monkeypatch):
    go_on = threading.Event()
    bench = Bench(monkeypatch, before=lambda wanted: go_on.wait(20))
    for name in "abc":
        assert bench.compilation.request(name, DIGITS) is None
    go_on.set()
    finished = bench.finish()
    assert sorted(finished) == ["a", "b", "c"]
    assert finished["a"].state.accept(ord("1"))
    assert not finished["b"].state.may_end
    assert bench.compiled == [r"\d+"]


def test_whitespace_makes_another_grammar_and_the_field_that_asks_does_not(monkeypatch):
    bench = Bench(monkeypatch)
    for name, whitespace in [("a", None), ("b", ""), ("c", " ?")]:
        assert bench.compilation.request(name, StructuredOutput("json_object", "", whitespace)) is None
    assert sorted(bench.finish(3)) == ["a", "b", "c"]


def test_the_grammar_used_longest_ago_is_dropped_first(monkeypatch):
    monkeypatch.setattr(grammar_compilation, "_MAX_KEPT", 2)
    bench = Bench(monkeypatch)
    for name in "abac":
        if bench.compilation.request(name, StructuredOutput("regex", name)) is None:
            bench.finish()
    assert bench.compilation.request("a", StructuredOutput("regex", "a")) is not None
    assert bench.compilation.request("c", StructuredOutput("regex", "c")) is not None
    assert bench.compilation.request("b", StructuredOutput("regex", "b")) is None


def test_a_grammar_that_cannot_be_compiled_is_refused_to_each_by_its_own_field_and_tried_again(monkeypatch):
    bench = Bench(monkeypatch)
    for name in "ab":
        bench.compilation.request(name, StructuredOutput("regex", "(", param=f"field_{name}"))
    finished = bench.finish()
    for name in "ab":
        assert finished[name].state is None
        assert finished[name].param == f"field_{name}"
        assert finished[name].message.startswith(f"field_{name} cannot be followed: ")
    assert bench.compilation.request("c", StructuredOutput("regex", "(")) is None
    assert bench.finish()["c"].state is None
    assert bench.compilation.request("good", DIGITS) is None
    assert bench.finish()["good"].state is not None


def test_whatever_goes_wrong_in_a_thread_ends_the_request_and_not_the_thread(monkeypatch):
    def before(wanted):
        if wanted.value == "bad":
            raise RuntimeError("not foreseen")

    bench = Bench(monkeypatch, before=before)
    for number in range(4):  # more than there are threads
        bench.compilation.request(f"bad {number}", StructuredOutput("regex", "bad"))
        assert "compiling it failed" in bench.finish()[f"bad {number}"].message
    bench.compilation.request("good", DIGITS)
    assert bench.finish()["good"].state is not None


def test_one_that_takes_too_long_is_given_up_and_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(grammar_compilation, "MAX_SECONDS", 0.05)
    go_on = threading.Event()
    bench = Bench(monkeypatch, before=lambda wanted: wanted.value == "slow" and go_on.wait(20))
    slow = StructuredOutput("regex", "slow", param="guided_regex")
    bench.compilation.request("slow", slow)
    while "slow" not in bench.compiled:
        time.sleep(0.01)
    bench.compilation.request("other", DIGITS)
    assert bench.done.acquire(timeout=20)
    finished = {}
    while len(finished) < 2:
        finished |= {grammar.request_id: grammar for grammar in bench.compilation.take_finished()}
    assert finished["other"].state is not None
    assert "takes more than" in finished["slow"].message
    assert finished["slow"].param == "guided_regex"
    go_on.set()
    assert bench.done.acquire(timeout=20)  # it ends after all, and nobody hears of it
    monkeypatch.setattr(grammar_compilation, "MAX_SECONDS", 20)
    bench.compilation.request("more", StructuredOutput("regex", "more"))
    assert bench.finish().keys() == {"more"}


def test_a_vocabulary_that_cannot_be_read_fails_the_request(monkeypatch):
    def load():
        raise TokenizerError("no such file")

    bench = Bench(monkeypatch, load=load)
    bench.compilation.request("a", DIGITS)
    assert "vocabulary cannot be read" in bench.finish()["a"].message


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
