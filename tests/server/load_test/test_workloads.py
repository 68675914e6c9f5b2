"""What is planned from options: traces with their sharing, files in every form, made-up sessions, and their times."""

import json
from itertools import islice
from statistics import fmean

import pytest

from scheduler.simulate.trace_files import read_trace
from server.load_test.options import parse
from server.load_test.prompt_files import BadPromptFile, read_prompts
from server.load_test.prompt_maker import Calibration, PromptMaker
from server.load_test.trace_prompts import BadTraceOptions
from server.load_test.workload import BadPlan, workload_of
from server.settings_error import SettingsError
from tests.data_files import DATA_DIR, mt_bench_turns

TRACES = DATA_DIR / "traces"
MOONCAKE = TRACES / "mooncake_conversation_part.jsonl"
CODING = TRACES / "coding_assistant_6.jsonl"
AZURE = TRACES / "azure_code_300.csv"
SERVEGEN = TRACES / "servegen"
WORDS = PromptMaker("s", Calibration())
IDS = PromptMaker("s", Calibration(), id_range=(10, 5000))


def planned(line, maker=WORDS, max_model_len=None, rate=None):
    workload = workload_of(parse(line.split(), "load-test"), 1, max_model_len)
    return workload.plan(maker, rate)


def prompts(plan):
    return [request.make_prompt() for session in plan.sessions for request in session.requests]


def words_of(prompt):
    return prompt.split() if isinstance(prompt, str) else prompt


@pytest.mark.parametrize("maker", [WORDS, IDS], ids=["words", "ids"])
def test_mooncake_prompts_share_what_its_block_ids_say(maker):
    plan = planned(f"--trace {MOONCAKE} --tokens-per-run 16", maker)
    trace = read_trace(MOONCAKE, seed=1).scaled(16)
    texts = list(map(words_of, prompts(plan)))
    turns = list(trace.turns())
    assert [len(text) for text in texts] == [turn.num_prompt_tokens for turn in turns]
    for one in range(0, len(turns), 3):
        for other in range(one + 1, min(one + 60, len(turns))):
            pairs = zip(turns[one].run_ids, turns[other].run_ids, strict=False)
            num_runs = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
            shared = next(
                (place for place, (a, b) in enumerate(zip(texts[one], texts[other], strict=False)) if a != b), 10**9
            )
            if num_runs is not None:  # the same up to the run that differs, and not much further by chance
                assert 16 * num_runs <= shared < 16 * num_runs + 4
    assert [request.max_tokens for session in plan.sessions for request in session.requests] == [
        turn.num_output_tokens for turn in turns
    ]
    assert any("cache without limit" in note for note in plan.notes)


def test_recorded_times_are_kept_sped_up_or_brought_to_a_rate():
    trace = read_trace(MOONCAKE, seed=1)
    starts = [session.start - trace.sessions[0].start for session in trace.sessions]
    plain, fast = planned(f"--trace {MOONCAKE}"), planned(f"--trace {MOONCAKE} --speed 10")
    assert [session.start for session in plain.sessions] == pytest.approx(starts)
    assert [session.start for session in fast.sessions] == pytest.approx([start / 10 for start in starts])
    for plan in (
        planned(f"--trace {MOONCAKE} --rate 5"),
        planned(f"--trace {MOONCAKE} --find-rate --slo-ttft 1", rate=5),
    ):
        dues = [session.start for session in plan.sessions]
        if len(dues) == len(starts):
            assert (len(dues) - 1) / dues[-1] == pytest.approx(5.0)
        gaps = [start / starts[9] for start in starts[:10]]
        assert [due / dues[9] for due in dues[:10]] == pytest.approx(gaps)  # in the rhythm of the trace
    redrawn = [session.start for session in planned(f"--trace {MOONCAKE} --rate 5 --arrivals constant").sessions]
    assert redrawn[:3] == [0.0, 0.2, 0.4]
    assert len(planned(f"--trace {MOONCAKE} --speed 10 --duration 60").sessions) == sum(start < 600 for start in starts)


def test_coding_assistants_think_between_their_turns():
    plan = planned(f"--trace {CODING} --token-scale 0.05 --session-spread 10")
    trace = read_trace(CODING, seed=1, session_spread=10)
    assert [len(session.requests) for session in plan.sessions] == [len(session.turns) for session in trace.sessions]
    for session, recorded in zip(plan.sessions, trace.sessions, strict=True):
        assert not session.is_conversation  # each prompt is whole: histories were edited on the way
        assert [request.think_time for request in session.requests[1:]] == [t.think_time for t in recorded.turns[1:]]
        sizes = [len(request.make_prompt().split()) for request in session.requests]
        # A run of 64 tokens becomes a whole number of tokens: 3, not 3.2.
        assert sizes == pytest.approx([turn.num_prompt_tokens * 3 / 64 for turn in recorded.turns], abs=1.01)


def test_recorded_think_times_can_be_shortened():
    whole, short = (planned(f"--trace {CODING} {flags}") for flags in ("", "--think-scale 0.1"))
    for one, other in zip(whole.sessions, short.sessions, strict=True):
        times = [request.think_time for request in one.requests]
        assert [request.think_time for request in other.requests] == pytest.approx([time * 0.1 for time in times])
        assert times[0] == 0.0
    idle = planned(f"--trace {CODING} --think-scale 0")
    assert not any(request.think_time for session in idle.sessions for request in session.requests)


def test_traces_without_sharing_are_scaled_too():
    whole, scaled = (read_trace(AZURE), planned(f"--trace {AZURE} --token-scale 0.1 --output-scale 2"))
    sizes = [len(prompt.split()) for prompt in prompts(scaled)]
    assert sizes == [max(1, round(turn.num_prompt_tokens * 0.1)) for turn in whole.turns()]
    assert scaled.sessions[5].requests[0].max_tokens == 2 * whole.sessions[5].turns[0].num_output_tokens
    assert len(set(prompts(scaled))) == len(sizes)
    with pytest.raises(BadTraceOptions, match="use --token-scale"):
        planned(f"--trace {AZURE} --tokens-per-run 4")


def test_servegen_is_drawn_with_its_bursts():
    plan = planned(f"--trace {SERVEGEN}#deepseek-r1:300 --token-scale 0.1")
    assert plan.sessions[-1].start < 300 and len(plan.sessions) > 20


def test_what_exceeds_the_model_is_left_out_and_said():
    plan = planned(f"--trace {MOONCAKE}", max_model_len=8192)
    assert any("exceeds 8192 tokens" in note for note in plan.notes)
    with pytest.raises(BadTraceOptions, match="shrink it"):
        planned(f"--trace {MOONCAKE}", max_model_len=16)
    with pytest.raises(BadPlan, match="Nothing is due"):
        planned(f"--trace {MOONCAKE} --rate 1 --arrivals poisson --duration 1ms")


def test_made_up_prompts_have_their_lengths_and_share_their_prefixes():
    line = "--rate 50 --duration 20 --input-tokens 20-40 --output-tokens 8 --prefix-tokens 30 --num-prefixes 3"
    plan = planned(line)
    texts = [prompt.split() for prompt in prompts(plan)]
    assert all(50 <= len(text) <= 70 for text in texts) and len(texts) == pytest.approx(1000, abs=120)
    assert len({tuple(text[:30]) for text in texts}) == 3 and len({tuple(text[30:40]) for text in texts}) == len(texts)
    assert [session.start for session in plan.sessions] == [session.start for session in planned(line).sessions]
    other = planned(line, WORDS.seeded("t"))
    assert not {tuple(prompt.split()[:30]) for prompt in prompts(other)} & {tuple(text[:30]) for text in texts}
    chat = planned(f"{line} --endpoint chat", PromptMaker("s", Calibration(), is_chat=True))
    roles = [[message["role"] for message in prompt] for prompt in prompts(chat)]
    assert roles == [["system", "user"]] * len(roles)


def test_lengths_follow_the_calibration():
    maker = PromptMaker("s", Calibration(fixed=10.0, per_word=1.25, is_measured=True))
    texts = prompts(planned("--num-requests 5 --rate 1 --input-tokens 135", maker))
    assert [len(text.split()) for text in texts] == [100] * 5
    ids = prompts(planned("--num-requests 5 --rate 1 --input-tokens 135 --prompt-ids 10-4999", IDS))
    assert [len(prompt) for prompt in ids] == [135] * 5


def test_conversations_have_turns():
    plan = planned("--concurrency 3 --num-requests 40 --turns 2-4 --think-time 2s --input-tokens 5")
    sizes = [len(session.requests) for session in plan.sessions]
    assert set(sizes) == {2, 3, 4} and plan.num_requests == sum(sizes) and 2 < fmean(sizes) < 4
    assert all(session.is_conversation for session in plan.sessions)
    assert {request.think_time for session in plan.sessions for request in session.requests} == {2.0}


def test_a_closed_loop_by_the_clock_has_no_end():
    plan = planned("--concurrency 3 --duration 5")
    assert plan.num_requests is None and len(list(islice(plan.sessions, 2000))) == 2000


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_rows_of_many_forms(tmp_path):
    rows = [
        {"prompt": "a\u2028b"},
        {"text": "b", "max_tokens": 3},
        {"question": "c", "output_tokens": 4.0},
        {"instruction": "d", "input": "e"},
        {"turns": ["f", "g"]},
        {
            "conversations": [
                {"from": "human", "value": "h"},
                {"from": "gpt", "value": "i"},
                {"from": "human", "value": "j"},
            ]
        },
        {"conversation": 1, "user": "k"},
        {"conversation": 1, "user": "l"},
        {"conversation": 2, "user": "m"},
        "n",
        {"prompt": [5, 6]},
    ]
    found = read_prompts(write_rows(tmp_path / "p.jsonl", rows), is_chat=False)
    assert [row.prompts for row in found] == [
        ("a\u2028b",),
        ("b",),
        ("c",),
        ("d\n\ne",),
        ("f", "g"),
        ("h", "j"),
        ("k", "l"),
        ("m",),
        ("n",),
        ([5, 6],),
    ]
    assert [row.max_tokens for row in found][:4] == [None, 3, 4, None]
    (tmp_path / "p.json").write_text(json.dumps([*rows[:6], *rows[9:]]), encoding="utf-8")
    assert read_prompts(tmp_path / "p.json", is_chat=False)[0] == found[0]
    (tmp_path / "p.txt").write_text("one\n\n two\r\n", encoding="utf-8")
    assert [row.prompts for row in read_prompts(tmp_path / "p.txt", is_chat=False)] == [("one",), (" two",)]
    messages = [{"role": "user", "content": "x"}]
    found = read_prompts(write_rows(tmp_path / "m.jsonl", [{"messages": messages}]), is_chat=True)
    assert found[0].prompts == (messages,)


@pytest.mark.parametrize(
    ("text", "is_chat", "sentence"),
    [
        ("{", False, "Line 1 of"),
        ("[1]", False, "neither a text nor an object"),
        ('{"x": 1}', False, "has no prompt"),
        ('{"prompt": ""}', False, "has no prompt"),
        ('{"turns": ["a", 3]}', False, "has no prompt"),
        ('{"prompt": "a", "max_tokens": 0}', False, "max_tokens must be"),
        ('{"prompt": "a", "max_tokens": Infinity}', False, "max_tokens must be"),
        ('{"prompt": "a", "at": -1}', False, "at must be seconds"),
        ('{"prompt": [1]}', True, "which chats do not take"),
        ('{"messages": [{"role": "user", "content": "x"}]}', False, "use --endpoint chat"),
        ("", False, "has no prompts"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, text, is_chat, sentence):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(BadPromptFile, match=sentence):
        read_prompts(tmp_path / "p.jsonl", is_chat=is_chat)


def test_a_file_is_replayed_at_its_times_or_asked_again_and_again(tmp_path):
    timed = write_rows(tmp_path / "t.jsonl", [{"prompt": str(n), "at": 3 + n / 2, "max_tokens": 5} for n in range(4)])
    plan = planned(f"--prompts {timed}")
    assert [session.start for session in plan.sessions] == [0.0, 0.5, 1.0, 1.5]
    untimed = write_rows(tmp_path / "u.jsonl", [{"turns": list(turns)} for turns in mt_bench_turns()])
    assert planned(f"--prompts {untimed}").num_requests == 160
    again = planned(f"--prompts {untimed} --num-requests 200 --output-tokens 7")
    assert prompts(again)[:2] == prompts(again)[160:162] and "again and again" in again.notes[0]
    assert {request.max_tokens for session in again.sessions for request in session.requests} == {7}
    with pytest.raises(SettingsError, match="rows all have `at`"):
        planned(f"--prompts {untimed} --arrivals recorded")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--rate 1 --concurrency 2", "--concurrency and --rate do not go together."),
        ("--trace a --prompts b", "--prompts and --trace do not go together."),
        ("--trace a --input-tokens 5", "--input-tokens and --trace do not go together."),
        ("--first 3", "--first needs --trace."),
        ("--arrivals poisson", "--arrivals poisson needs --rate or --find-rate."),
        ("--burstiness 2 --rate 1", "--burstiness needs --arrivals gamma."),
        ("--find-rate", "--find-rate needs an objective: --slo-ttft, --slo-tpot, --slo-itl or --slo-e2e."),
        (
            "--find-rate --slo-ttft 1 --duration 20 --least-rate 0.1",
            "--least-rate: a trial at 0.1 sessions/s would have about 2 sessions in 20 s, and it takes 10 to judge one:"
            " give --least-rate 0.5, or --duration 100.",
        ),
        (
            "--find-rate --slo-ttft 1 --rate 0.2",
            "--rate: a trial at 0.2 sessions/s would have about 6 sessions in 30 s, and it takes 10 to judge one:"
            " give --rate 0.3333, or --duration 50.",
        ),
        ("--find-rate --slo-ttft 1 --least-rate 3 --most-rate 2", "--most-rate 2 lies below --least-rate 3."),
        ("--fail-under", "--fail-under needs an objective: --slo-ttft, --slo-tpot, --slo-itl or --slo-e2e."),
        ("--slo-ttft 0", "Argument --slo-ttft: 0 is not a time above 0."),
        ("--slo-ttft 5x", "Argument --slo-ttft: '5x' is no time such as 2, 2s, 200ms or 5m."),
        ("--rate nan", "Argument --rate: nan is not between 1e-06 and 1e+06."),
        ("--input-tokens 5-3", "the least one first."),
        ("--prompt-ids 5", "is no range of token ids such as 1000-30000."),
        ("--endpoint chat --prompt-ids 5-9", "chats take no token ids."),
        ("--extra-body [1]", "is no JSON object."),
        ("--concurency 3", "There is no flag --concurency; did you mean --concurrency?"),
        ("http://a b", "There is one argument too many: b."),
        ("--max-concurrency 3", "--max-concurrency needs --rate or --trace or --prompts or --find-rate."),
    ],
)
def test_wrong_usage_is_told_in_one_sentence(line, sentence):
    with pytest.raises(SettingsError) as caught:
        parse(line.split(), "load-test")
    assert str(caught.value).endswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("2", 2), ("200ms", 0.2), ("1.5s", 1.5), ("5m", 300), ("1h", 3600)])
def test_times_have_units(text, seconds):
    assert parse(["--slo-ttft", text], "load-test").slo_ttft == pytest.approx(seconds)
