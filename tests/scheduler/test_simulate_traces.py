"""Traces: reading them, shrinking them without losing their sharing, and the tokens that stand for their runs."""

import json
from itertools import pairwise, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.simulate.prompts import GENERATED, prompt_token_ids
from scheduler.simulate.trace_files import read_trace
from scheduler.simulate.traces import Session, Trace, Turn, UnreadableTrace
from tests import data_files

MOONCAKE = data_files.DATA_DIR / "traces/mooncake_conversation_part.jsonl"
AZURE = data_files.DATA_DIR / "traces/azure_code_300.csv"
CODING_ASSISTANT = data_files.DATA_DIR / "traces/coding_assistant_6.jsonl"
SERVEGEN = data_files.DATA_DIR / "traces/servegen"

turns = st.builds(
    Turn,
    num_prompt_tokens=st.integers(1, 40),
    num_output_tokens=st.integers(1, 9),
    run_ids=st.lists(st.integers(0, 3), max_size=8),
)
traces = st.lists(turns, min_size=1, max_size=12).map(
    lambda drawn: Trace("drawn", tuple(Session(float(n), (turn,)) for n, turn in enumerate(drawn)), tokens_per_run=4)
)


def num_common(left, right):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def test_a_mooncake_trace_is_read_whole_and_its_clumps_are_spread():
    rows = [json.loads(line) for line in MOONCAKE.read_text().splitlines()]
    trace = read_trace(MOONCAKE)
    assert (trace.num_requests, trace.tokens_per_run) == (len(rows), 512)
    assert trace.num_prompt_tokens == sum(row["input_length"] for row in rows)
    assert trace.num_output_tokens == sum(row["output_length"] for row in rows)
    starts = [session.start for session in trace.sessions]
    assert starts == sorted(starts)
    for row, session in zip(rows, trace.sessions, strict=True):
        assert len(session.turns[0].run_ids) == -(-row["input_length"] // 512)
        assert session.turns[0].num_prompt_tokens == row["input_length"]


def test_times_that_were_rounded_are_spread_and_others_are_left_alone(tmp_path):
    def write(times):
        rows = [{"timestamp": t, "input_length": 9, "output_length": 1, "hash_ids": [n]} for n, t in enumerate(times)]
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_trace(path)

    times = [3000 * (n // 10) for n in range(60)]
    clumped = write(times)
    arrivals = [session.start for session in clumped.sessions]
    assert all(t / 1000 <= arrival <= t / 1000 + 3 for t, arrival in zip(times, arrivals, strict=True))
    assert len(set(arrivals)) == 60
    assert [list(session.turns[0].run_ids) for session in clumped.sessions] == [[n] for n in range(60)]
    assert "3.0 s" in clumped.notes[0]
    alone = write(range(0, 6000, 100))
    assert [session.start for session in alone.sessions] == [n / 10 for n in range(60)]
    assert alone.notes == ()


def test_an_azure_trace_shares_nothing():
    trace = read_trace(AZURE)
    assert trace.num_requests == 300
    assert trace.sessions[0] == Session(0.0, (Turn(4808, 10),))
    assert trace.sessions[1].start == pytest.approx(0.052)
    assert trace.hit_rate_limit() == 0.0


def test_a_coding_assistant_goes_on_in_a_closed_loop_and_shares_nothing_with_another():
    trace = read_trace(CODING_ASSISTANT, session_spread=100.0)
    assert len(trace.sessions) == 6
    assert trace.num_requests == len(CODING_ASSISTANT.read_text().splitlines())
    assert all(0 <= session.start <= 100 for session in trace.sessions)
    runs = [{run for turn in session.turns for run in turn.run_ids} for session in trace.sessions]
    assert sum(map(len, runs)) == len(set().union(*runs))
    assert all(turn.think_time >= 0 for turn in trace.turns())
    assert 0.5 < trace.hit_rate_limit() < 1


def test_servegen_draws_as_often_and_as_long_as_its_clients():
    trace = read_trace(f"{SERVEGEN}#deepseek-r1:3600")
    # Rates of the clients whose lengths are known, times ten minutes each.
    expected = 600 * sum(
        float(line.split(",")[3])
        for line in (SERVEGEN / "client_rates.csv").read_text().splitlines()[1:]
        if not line.startswith("deepseek-r1,35,")
    )
    assert trace.num_requests == pytest.approx(expected, rel=0.15)
    assert read_trace(f"{SERVEGEN}#deepseek-r1:3600", rate=2.0).num_requests == pytest.approx(2 * expected, rel=0.15)
    assert any("35" in note for note in trace.notes)
    gaps = [later.start - earlier.start for earlier, later in pairwise(trace.sessions)]
    assert min(gaps) >= 0 and trace.sessions[-1].start < 3600
    lengths = [json.loads(line) for line in (SERVEGEN / "client_lengths.jsonl").read_text().splitlines()]
    assert all(
        min(row["input_tokens"][0] for row in lengths)
        <= turn.num_prompt_tokens
        <= max(row["input_tokens"][-1] for row in lengths)
        for turn in trace.turns()
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("{]\n", "line 1"),
        ("[1]\n", "not a JSON object"),
        ('{"prompt": 1}\n', "neither"),
        ('{"hash_ids": [1], "timestamp": 0}\n', "input_length"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,x,1\n", "line 2"),
    ],
)
def test_what_is_no_trace_is_refused_in_words(tmp_path, text, says):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(UnreadableTrace, match=rf"(?i){says}"):
        read_trace(path)
    with pytest.raises(UnreadableTrace, match="no rates"):
        read_trace(f"{SERVEGEN}#gpt-9:60")
    with pytest.raises(UnreadableTrace, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")


@given(turns, turns)
def test_prompts_share_tokens_exactly_where_they_share_runs(left, right):
    first, second = prompt_token_ids(left, 4, 0), prompt_token_ids(right, 4, 1)
    assert (len(first), len(second)) == (left.num_prompt_tokens, right.num_prompt_tokens)
    shared = min(4 * num_common(left.run_ids, right.run_ids), len(first), len(second))
    assert num_common(first, second) == shared
    assert GENERATED not in first


def test_a_run_is_told_from_what_follows_it_when_a_prompt_ends_inside():
    cut, whole = Turn(6, 1, [7, 8]), Turn(9, 1, [7, 8])
    assert num_common([*prompt_token_ids(cut, 4, 0), GENERATED], prompt_token_ids(whole, 4, 1)) == 6


@given(traces, st.sampled_from([1, 2, 8, 16]))
def test_scaled_prompts_share_the_same_runs(trace, tokens_per_run):
    scaled = trace.scaled(tokens_per_run, output_scale=0.5)
    for before, after in zip(trace.turns(), scaled.turns(), strict=True):
        assert after.run_ids == before.run_ids
        assert after.num_prompt_tokens == -(-before.num_prompt_tokens * tokens_per_run // 4)
        assert after.num_output_tokens >= 1
    same = trace.scaled(trace.tokens_per_run)
    assert same == trace


@given(traces, st.floats(0.01, 1), st.integers(0, 3))
def test_a_sample_keeps_or_loses_whole_roots(trace, share, seed):
    kept = trace.sampled(share, seed)
    common = 0
    prompts = [turn.run_ids for turn in trace.turns()]
    while len(prompts) > 1 and all(len(runs) > common and runs[common] == prompts[0][common] for runs in prompts):
        common += 1

    def roots(sessions):
        return {s.turns[0].run_ids[common] for s in sessions if len(s.turns[0].run_ids) > common}

    lost = [session for session in trace.sessions if session not in kept.sessions]
    assert not roots(kept.sessions) & roots(lost)
    assert trace.sampled(1.0, seed) == trace


def test_a_sample_by_roots_keeps_the_hit_rate():
    trace = read_trace(MOONCAKE)
    rates = [trace.sampled(0.5, seed).hit_rate_limit() for seed in range(4)]
    assert sum(rates) / 4 == pytest.approx(trace.hit_rate_limit(), abs=0.06)


def test_sessions_are_cut_before_the_first_turn_that_does_not_fit():
    turns = tuple(Turn(n, 5) for n in (10, 20, 99, 10))
    trace = Trace("t", (Session(0.0, turns), Session(1.0, turns[2:])))
    fitting = trace.within(max_model_len=100, max_tokens=1000)
    assert fitting.sessions == (Session(0.0, turns[:2]),)
    assert "4 of 6 requests" in fitting.notes[0]
    assert trace.within(104, 104) == trace


def test_a_faster_trace_starts_sooner_and_thinks_as_long():
    trace = read_trace(CODING_ASSISTANT)
    faster = trace.faster(4.0)
    assert faster.sessions[-1].start == trace.sessions[-1].start / 4
    assert list(faster.turns()) == list(trace.turns())
    assert all(session.start < 300 for session in faster.until(300).sessions)
    assert faster.first(2).sessions == faster.sessions[:2]
