"""Structured requests in the scheduler: waiting for a grammar, masks of the right rows, the end, what looks back."""

import json

import llguidance
import pytest

from scheduler import grammar as grammar_module
from scheduler.admission import RequestRefused
from scheduler.grammar import GrammarCompiler
from scheduler.output import NewRow, RowResult, SequenceFailure, StepResult
from scheduler.request import SequenceStatus
from scheduler.sampling_params import StructuredOutput
from tests.scheduler.bench import Bench
from tests.scheduler.fake_runner import VOCAB_SIZE, allowed_tokens, fake_vocabulary

OBJECT = StructuredOutput("json_object")
TOKENS = fake_vocabulary().tokens
OVERLAP = pytest.mark.parametrize("overlapped", [False, True])


def ids(text):
    return [TOKENS.index(char.encode()) for char in text]


def text_of(bench, name, index=0):
    return b"".join(TOKENS[i] for i in bench.tokens[name, index]).decode()


def test_a_request_waits_for_its_grammar_and_holds_up_nobody():
    bench = Bench()
    structured = bench.add("structured", structured_output=OBJECT, with_grammar=False)
    [sequence] = structured.sequences
    assert sequence.status is SequenceStatus.WAITING_FOR_GRAMMAR
    assert (bench.scheduler.has_unfinished, bench.scheduler.has_runnable) == (True, False)
    assert bench.step().rows == ()
    assert bench.scheduler.stats.num_waiting == 1
    bench.add("other")
    assert [row.seq_id for row in bench.step().rows] == [1]
    bench.provide_grammar("structured")
    assert [row.seq_id for row in bench.step().rows] == [1, 0]
    bench.drain()
    bench.assert_all_exact()


def test_a_request_keeps_its_place_while_its_grammar_is_made():
    bench = Bench(max_num_seqs=1)
    bench.add("first", structured_output=OBJECT, with_grammar=False)
    bench.add("running")
    bench.step()
    bench.add("last")
    bench.provide_grammar("first")
    bench.drain()
    assert [name for name, _ in bench.finish_reasons] == ["running", "first", "last"]


@pytest.mark.parametrize("index", [None, 0])
def test_a_request_that_is_aborted_before_its_grammar_is_there_is_gone(index):
    bench = Bench()
    bench.add("a", structured_output=OBJECT, with_grammar=False)
    bench.abort("a", index)
    bench.scheduler.check_integrity()
    assert not bench.scheduler.has_unfinished
    bench.provide_grammar("a")
    bench.scheduler.check_integrity()
    assert not bench.scheduler.has_unfinished


def test_only_rows_that_sample_under_a_grammar_have_masks():
    bench = Bench(max_num_batched_tokens=8)
    bench.add("plain", prompt_len=2, max_tokens=9)
    bench.add("structured", prompt_len=9, max_tokens=9, structured_output=OBJECT)
    chunk, whole = bench.step(), bench.step()
    assert chunk.grammar_masks == ()
    assert [row.num_new_tokens for row in whole.rows] == [1, 3]
    [mask] = whole.grammar_masks
    assert mask.place == 1
    assert set(allowed_tokens(mask.bitmask)) == {*ids("{"), TOKENS.index(b'{"a":')}


@OVERLAP
@pytest.mark.parametrize("n", [1, 3])
def test_answers_follow_their_grammar_through_chunks_forks_and_preemption(overlapped, n):
    schema = {"properties": {"a": {"enum": ["abc", "x"]}}, "required": ["a"], "additionalProperties": False}
    wanted = StructuredOutput("json_schema", json.dumps({"type": "object", **schema}))
    bench = Bench(num_blocks=8, block_size=4, max_num_batched_tokens=5, overlapped=overlapped)
    for name in "abcd":
        bench.add(name, prompt_len=7, max_tokens=25, n=n, structured_output=wanted)
    bench.drain()
    assert bench.scheduler.stats.num_preemptions > 0
    bench.assert_all_exact()
    for (name, index), reason in bench.finish_reasons.items():
        if reason == "stop":
            assert json.loads(text_of(bench, name, index))["a"] in ("abc", "x")
    assert list(bench.finish_reasons.values()).count("stop") >= 2 * n


@OVERLAP
def test_a_complete_answer_ends_without_an_end_token(overlapped):
    bench = Bench(overlapped=overlapped)
    bench.add("a", max_tokens=9, structured_output=StructuredOutput("choice", '["abc"]'), ignore_eos=True)
    bench.drain()
    assert text_of(bench, "a") == "abc"
    assert bench.updates["a", 0][-1].finish_reason == "stop"
    assert bench.updates["a", 0][-1].stop_token_id is None


def test_end_and_stop_tokens_are_let_in_where_the_answer_may_end_and_nowhere_else():
    eos, stop = TOKENS.index(b"ab"), TOKENS.index(b"x")
    wanted = StructuredOutput("regex", "c(ab)*")
    for params, ends in [({}, {eos, stop}), ({"ignore_eos": True}, {stop})]:
        bench = Bench(eos_token_ids=frozenset({eos}))
        bench.add("a", max_tokens=9, structured_output=wanted, stop_token_ids=(stop,), **params)
        first, second = bench.step().grammar_masks[0], bench.step().grammar_masks[0]
        assert allowed_tokens(first.bitmask) == ids("c")
        others = {*ids("a")} | {i for i, token in enumerate(TOKENS) if token == b"ab" and i not in (3, 17, 31)}
        assert set(allowed_tokens(second.bitmask)) == others | ends


def test_an_answer_that_is_whole_may_end_by_an_ignored_end_token_if_nothing_else_follows():
    eos = 3
    wanted = StructuredOutput("grammar", 'start: "c" rest\nrest: ""')
    bench = Bench(eos_token_ids=frozenset({eos}))
    bench.add("a", max_tokens=9, structured_output=wanted, ignore_eos=True)
    bench.drain()
    assert bench.finish_reasons["a", 0] == "stop"
    assert [i for i in bench.tokens["a", 0] if i != eos] == ids("c")


def test_a_grammar_that_no_token_can_go_on_with_fails_its_request_alone():
    bench = Bench()
    dead_end = StructuredOutput("regex", "a[{]g", param="guided_regex")  # no token has a g
    bench.add("a", max_tokens=9, structured_output=dead_end)
    bench.add("b", max_tokens=9)
    bench.drain()
    assert bench.finish_reasons == {("a", 0): "error", ("b", 0): "length"}
    assert bench.tokens["b", 0] == bench.expected("b")
    assert bench.updates["a", 0][-1].failure == SequenceFailure(
        "After 2 tokens of the answer, no token is allowed by guided_regex.", "guided_regex"
    )
    assert all(update.failure is None for update in bench.updates["b", 0])


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"structured_output": OBJECT, "bad_words": ((1,),)}, ["structured_outputs", "bad_words"]),
        ({"structured_output": OBJECT, "allowed_token_ids": (1, 2)}, ["structured_outputs", "allowed_token_ids"]),
        ({"allowed_token_ids": (1,), "bad_words": ((1,),)}, ["allowed_token_ids", "bad_words"]),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1,),), "min_tokens": 1},
         ["allowed_token_ids", "bad_words", "min_tokens"]),
        ({"logit_bias": ((1, -100.0),)}, []),
    ],
)  # fmt: skip
def test_fields_that_together_allow_no_token_are_named(params, named):
    bench = Bench()
    bench.add("a", **params)
    output = bench.scheduler.schedule()
    [update] = bench.scheduler.update(output, StepResult((RowResult(is_dead_end=True),)))
    assert update.finish_reason == "error"
    assert update.failure.param == (named[0] if named else None)
    if named:
        names = " and ".join(named)
        assert update.failure.message == f"After 0 tokens of the answer, no token is allowed by {names} together."


def test_a_grammar_that_becomes_too_costly_is_named_with_the_reason(monkeypatch):
    limits = llguidance.LLParserLimits(verbose_errors=False, step_lexer_fuel=300)
    monkeypatch.setattr(grammar_module, "_limits", lambda: limits)
    wanted = StructuredOutput("regex", "(a|b)*a(a|b){50}c", param="guided_regex")
    bench = Bench()
    bench.add("a", max_tokens=60, structured_output=wanted, with_grammar=False)
    bench.scheduler.provide_grammar("a", GrammarCompiler(fake_vocabulary(), VOCAB_SIZE).compile(wanted))
    bench.drain()
    assert bench.finish_reasons["a", 0] == "error"
    failure = bench.updates["a", 0][-1].failure
    assert failure.param == "guided_regex"
    assert failure.message == (
        f"After {len(bench.tokens['a', 0])} tokens of the answer, guided_regex cannot be followed any further, "
        "for it takes too much: lexer error: too many expressions constructed."
    )


def test_a_token_that_the_grammar_has_not_fails_the_request():
    bench = Bench()
    bench.add("a", max_tokens=9, structured_output=StructuredOutput("regex", "c+"))
    bench.step()
    output = bench.scheduler.schedule()
    [update] = bench.scheduler.update(output, StepResult((RowResult(tuple(ids("d"))),)))
    assert update.finish_reason == "error"
    assert update.failure.param is None, "the mask allowed it, or should have"
    assert "doesn't satisfy the grammar" in update.failure.message
    assert not bench.scheduler.has_unfinished


def test_a_stop_token_before_min_tokens_does_not_end_a_sequence():
    probe = Bench()
    probe.add("a", max_tokens=9)
    probe.drain()
    tokens = probe.tokens["a", 0]
    for min_tokens in range(5):
        bench = Bench()
        bench.add("a", max_tokens=9, stop_token_ids=tuple(tokens), min_tokens=min_tokens)
        bench.drain()
        # The fake runner samples it nevertheless, as no real one does.
        assert len(bench.tokens["a", 0]) == min_tokens + 1
        assert bench.finish_reasons["a", 0] == "stop"


@OVERLAP
@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"bad_words": ((1, 2),)}, {"presence_penalty": 1.0}],
)
def test_the_runner_is_told_the_tokens_that_sampling_looks_back_at(overlapped, params):
    bench = Bench(num_blocks=9, block_size=4, max_num_batched_tokens=6, overlapped=overlapped)
    for name in "abc":
        bench.add(name, prompt_len=6, max_tokens=14, n=2, **params)  # the fake runner checks what it is told
    bench.drain()
    assert bench.scheduler.stats.num_preemptions > 0
    bench.assert_all_exact()


def test_one_that_looks_back_waits_for_its_token_while_others_run_ahead():
    bench = Bench(overlapped=True)
    bench.add("ahead", max_tokens=6)
    bench.add("back", max_tokens=6, presence_penalty=0.5)
    rows = [[row.seq_id for row in bench.step().rows] for _ in range(4)]
    assert rows == [[0, 1], [0], [0, 1], [0]]
    bench.drain()
    bench.assert_all_exact()


def test_requests_wait_by_priority_then_by_arrival():
    bench = Bench(max_num_seqs=1)
    for name, priority in [("running", -5), ("later", 1), ("urgent", -3), ("also later", 1), ("normal", 0)]:
        bench.add(name, priority=priority, max_tokens=2)
        if name == "running":
            bench.step()
    bench.drain()
    assert [name for name, _ in bench.finish_reasons] == ["running", "urgent", "normal", "later", "also later"]


def test_the_siblings_of_a_request_stand_where_it_stood():
    bench = Bench(max_num_seqs=1)
    bench.add("a", n=3, max_tokens=2)
    bench.add("low", priority=1, max_tokens=2)
    bench.step()
    bench.add("equal", max_tokens=2)
    bench.drain()
    assert list(bench.finish_reasons) == [("a", 0), ("a", 1), ("a", 2), ("equal", 0), ("low", 0)]


@OVERLAP
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_pooling_request_ends_with_its_embedding(overlapped, pooling):
    bench = Bench(num_blocks=12, block_size=4, max_num_batched_tokens=4, overlapped=overlapped)
    for name in "abc":
        bench.add(name, prompt_len=18, max_tokens=0, pooling=pooling)
    bench.add("text", max_tokens=8)
    bench.drain()
    for name in "abc":
        [update] = bench.updates[name, 0]
        assert (update.token_ids, update.finish_reason) == ((), "stop")
        assert update.embedding
    assert bench.tokens["text", 0] == bench.expected("text")


@pytest.mark.parametrize("params", [{"n": 2, "max_tokens": 0}, {"max_tokens": 3}])
def test_pooling_beside_sampling_is_refused(params):
    with pytest.raises(RequestRefused, match="pooled"):
        Bench().add("a", pooling="mean", **params)


def test_updates_count_the_tokens_that_were_computed_again():
    bench = Bench(num_blocks=8, block_size=4)
    for name in "abcd":
        bench.add(name, prompt_len=6, max_tokens=20)
    bench.drain()
    counts = [[update.num_recomputed_tokens for update in bench.updates[key]] for key in bench.updates]
    assert bench.scheduler.stats.num_recomputed_tokens > 0
    assert sum(count[-1] for count in counts) == bench.scheduler.stats.num_recomputed_tokens
    # So far: an answer that the edge ends at a stop string has no last update.
    assert all(count == sorted(count) for count in counts)
    assert any(count[-2] > 0 for count in counts)


def test_a_preempted_answer_goes_on_in_its_grammar():
    bench = Bench(num_blocks=6, block_size=4)
    bench.add("a", prompt_len=3, max_tokens=14, structured_output=OBJECT)
    bench.add("b", prompt_len=9, max_tokens=11)
    resumed = []
    while bench.scheduler.has_unfinished:
        resumed += [row for row in bench.step().rows if isinstance(row, NewRow) and row.seq_id == 0]
    assert len(resumed) > 1
    assert len(resumed[1].token_ids) > 3
    bench.assert_all_exact()
