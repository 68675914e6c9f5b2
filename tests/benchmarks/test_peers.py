"""The comparison of servers, on scripted ones: turns, texts, ratios, goals, and servers that fail."""

import asyncio
import copy
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import peers
from benchmarks.baseline import Figures
from benchmarks.packet_client import Packets
from benchmarks.peer_loads import NUM_TURNS, Conversation, Load, Point, RoundResult, closed_loop, make_texts
from benchmarks.peer_ratios import PointResult, medians, ratio, summary
from benchmarks.peer_report import report
from benchmarks.peer_servers import ServerPlan, llama_plan, octavo_plan, vllm_plan

SCRIPT = Path(__file__).with_name("scripted_server.py")
COMPLETIONS = Point("completions", 16, 4, 2, num_jobs=3, num_rounds=2)
CHATS = Point("chats", 40, 3, 2, num_jobs=2, num_rounds=1)


def plan(name: str, *flags: str) -> ServerPlan:
    return ServerPlan(
        name=name,
        program=(sys.executable, "-S", str(SCRIPT)),
        shown_program="scripted",
        flags=flags,
        ready_path="/health",
        version_path="/version",
        version_key="version",
        why="to test",
    )


def result_of(speed: float | None, first: float = 1.0, errors: dict[str, int] | None = None) -> RoundResult:
    figures = None if speed is None else Figures(speed, first, first, 0.1, 0.1)
    return RoundResult(figures, 1.0, 1, 100.0, None, 0.01, 0.002, errors or {})


@pytest.fixture(scope="module")
def measured() -> dict:
    """Our scripted server, a slower one that refuses chats, and one that ends at once."""
    plans = [plan("octavo"), plan("llama.cpp", "--delay", "0.003", "--refuse-chats"), plan("vllm", "--no-such-flag")]
    console = Console(stderr=True, quiet=True)
    deadline = time.monotonic() + 600
    measured = peers.measure(plans, (COMPLETIONS, CHATS), 0, deadline, console)
    return json.loads(json.dumps(measured))  # all of it goes into a file


def test_every_round_of_every_load_is_measured_on_every_server_in_turns(measured):
    completions, chats = measured["points"]
    assert [list(by_server) for by_server in completions["rounds"]] == [
        ["octavo", "llama.cpp"],
        ["llama.cpp", "octavo"],
    ]
    for by_server in completions["rounds"]:
        for result in by_server.values():
            assert (result["num_answers"], result["errors"]) == (COMPLETIONS.num_jobs, {})
            assert (result["num_prompt_tokens"], result["num_cached_tokens"]) == (COMPLETIONS.num_words, 0)
    assert completions["ratios"]["llama.cpp"]["output_tokens_per_second"] > 1
    assert completions["ratios"]["llama.cpp"]["inter_token_p50"] < 1
    (by_server,) = chats["rounds"]
    assert by_server["octavo"]["num_answers"] == CHATS.num_jobs * NUM_TURNS
    # The warm-up has brought the system prompt into the cache.
    assert by_server["octavo"]["num_cached_tokens"] == CHATS.num_words


def test_what_fails_is_reported_and_ends_nothing(measured):
    ours, llama, vllm = measured["servers"]
    assert (ours["version"], ours["error"], llama["error"]) == ("1.2.3", None, None)
    assert vllm["version"] is None
    assert "unrecognized arguments: --no-such-flag" in vllm["error"]
    chats = measured["points"][1]
    (failure,) = chats["servers"]["llama.cpp"]["errors"].items()
    # Each conversation ends with the turn that failed.
    assert failure[0].startswith("status 501")
    assert failure[1] == CHATS.num_jobs
    assert chats["servers"]["llama.cpp"]["output_tokens_per_second"] is None
    assert chats["against_best"]["output_tokens_per_second"] is None
    assert peers._went_wrong(measured)


def test_the_page_says_what_was_measured_and_what_went_wrong(measured):
    head = {"question": "", "command": "python benchmarks/peers.py", "model": "smollm2", "unit": "seconds"}
    page = report(head | measured)
    ratio = measured["points"][0]["ratios"]["llama.cpp"]["output_tokens_per_second"]
    assert f"| {ratio:.2f} |" in page
    assert "vLLM: scripted_server.py: error: unrecognized arguments: --no-such-flag" in page
    assert f"{CHATS.num_jobs} times: status 501" in page
    for line in page.split("\n"):
        if line.startswith("| "):
            assert line.count("|") == line.count(" | ") + 2


async def test_rounds_that_would_end_too_late_are_left_out_but_for_the_first():
    measurement = peers.Measurement([], (COMPLETIONS, CHATS), 0, Console(quiet=True))

    class Server:
        plan = plan("octavo")

    async def turn(*_: object) -> RoundResult:
        return result_of(1.0)

    measurement._servers = [Server()]
    measurement._turn = turn
    results = await measurement.run(deadline=time.monotonic() - 1)
    assert [len(result.rounds) for result in results] == [1, 1]
    assert measurement.left_out == ["round 2 of 16-word prompts, 4 tokens, 2 clients: time was up"]


def test_texts_differ_from_their_first_words_on_but_for_the_system_prompt_of_a_round():
    points = (*peers.POINTS, replace(CHATS, num_rounds=3))
    texts = make_texts(points, 5, seed=0)
    assert len(texts) == sum(point.num_rounds for point in points)
    beginnings = []
    for (point, _), of_round in texts.items():
        assert len(of_round.jobs) == point.num_jobs
        if point.kind == "completions":
            assert {len(job.split()) for job in of_round.jobs} == {point.num_words}
            beginnings += [of_round.warm_up, *of_round.jobs]
        else:
            (system,) = {job.system for job in (of_round.warm_up, *of_round.jobs)}
            questions = [job.questions for job in (of_round.warm_up, *of_round.jobs)]
            assert len(set(questions)) == point.num_jobs + 1
            assert len(system.split()) == point.num_words
            beginnings.append(system)
    # 16 words make at least one block of 16 tokens.
    first_words = [tuple(text.split()[:16]) for text in beginnings]
    assert len(set(first_words)) == len(first_words)


@pytest.mark.parametrize("num_clients", [1, 3])
async def test_each_client_does_one_job_at_a_time(num_clients):
    now = most = 0

    async def do(job: str) -> list[Packets]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return [Packets(0.0, ((1.0, job.encode()),), None)]

    jobs = [str(number) for number in range(7)]
    packets = await closed_loop(num_clients, jobs, do)
    assert most == num_clients
    assert sorted(each.received[0][1].decode() for each in packets) == jobs


async def test_a_conversation_sends_all_that_was_said_before():
    sent = []

    class Client:
        async def post(self, path: str, body: dict) -> Packets:
            sent.append((path, copy.deepcopy(body)))
            events = [{"choices": [{"delta": {"content": text}}]} for text in (f"answer {len(sent)}", ".")]
            events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 5}})
            data = [json.dumps(event) for event in events] + ["[DONE]"]
            stream = "HTTP/1.1 200 OK\r\n\r\n" + "".join(f"data: {each}\n\n" for each in data)
            return Packets(0.0, tuple((0.1, part.encode()) for part in stream.splitlines(keepends=True)), None)

    load = Load(0, "a-model", CHATS, 1)
    load._client = Client()
    packets = await load._talk(Conversation("s", ("q1", "q2")), 5)
    assert len(packets) == 2
    assert [path for path, _ in sent] == ["/v1/chat/completions"] * 2
    said = [(message["role"], message["content"]) for message in sent[1][1]["messages"]]
    assert said == [("system", "s"), ("user", "q1"), ("assistant", "answer 1."), ("user", "q2")]


def test_ratios_are_medians_of_the_rounds_in_which_both_answered():
    rounds = (
        {"octavo": result_of(10), "vllm": result_of(5)},
        {"octavo": result_of(30), "vllm": result_of(5)},
        {"octavo": result_of(None), "vllm": result_of(5)},
        {"octavo": result_of(40)},
        {"octavo": result_of(40), "vllm": result_of(10)},
    )
    assert ratio(PointResult(COMPLETIONS, rounds), "vllm", "output_tokens_per_second") == 4
    assert ratio(PointResult(COMPLETIONS, rounds), "llama.cpp", "output_tokens_per_second") is None


def test_the_best_peer_is_the_one_that_we_look_worst_beside():
    one = {"octavo": result_of(28, 0.3), "llama.cpp": result_of(20, 1.0), "vllm": result_of(10, 0.5)}
    ours = PointResult(replace(COMPLETIONS, num_clients=1), (one,))
    said = summary(ours, ["llama.cpp", "vllm"])
    assert said["against_best"]["output_tokens_per_second"] == pytest.approx(1.4)
    assert said["against_best"]["ttft_p50"] == pytest.approx(0.6)
    assert (said["speed_goal"], said["speed_reached"]) == (1.4, True)
    assert said["first_token_reached"]
    worse = summary(PointResult(replace(COMPLETIONS, num_clients=8), (one,)), ["llama.cpp", "vllm"])
    assert (worse["speed_goal"], worse["speed_reached"]) == (2.5, False)
    alone = summary(ours, [])
    assert (alone["speed_reached"], alone["first_token_reached"]) == (None, None)


def test_errors_of_all_rounds_are_counted():
    results = [result_of(1.0, errors={"refused": 2}), result_of(None, errors={"refused": 1, "broke off": 1})]
    assert medians(results)["errors"] == {"refused": 3, "broke off": 1}
    assert medians(results)["output_tokens_per_second"] == 1.0


def test_shown_commands_tell_no_folders_of_this_machine(tmp_path):
    plans = [
        octavo_plan("smollm2", []),
        octavo_plan(str(tmp_path / "a.gguf"), ["--block-size", "32"]),
        llama_plan(tmp_path / "llama-server", tmp_path / "a.gguf", 32, []),
        vllm_plan(tmp_path / "vllm", tmp_path / "directory", 32, ["--dtype", "float32"]),
    ]
    shown = [each.shown_command for each in plans]
    assert not [command for command in shown if str(tmp_path) in command]
    assert shown[:2] == ["octavo serve", "octavo serve --model a.gguf --block-size 32"]
    assert "llama-server --model a.gguf --threads" in shown[2]
    assert "vllm serve directory --max-model-len" in shown[3]
    assert shown[3].endswith("--dtype float32")
    assert (
        peers._shown(f"python benchmarks/peers.py --vllm {tmp_path}/vllm") == "python benchmarks/peers.py --vllm vllm"
    )
