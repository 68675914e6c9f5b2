"""The command as people use it, against the stand-in: tables, JSON, the page, exit codes, keys, the search."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from server import cli
from server.load_test import trials
from server.load_test.command import main
from server.load_test.svg_plots import Series, plot
from tests.server.load_test.stand_in import stand_in

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


async def run(served, line: str, run_main=main) -> int:
    return await asyncio.to_thread(run_main, [*line.split(), "--no-progress", served.url])


class Page(HTMLParser):
    """Takes a page apart, and fails where elements do not close."""

    VOID = ("meta", "line", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


async def test_a_load_is_run_printed_and_written(tmp_path, capsys):
    async with stand_in(first_delay=0.02, delay=0.005) as served:
        line = "--rate 40 --num-requests 30 --output-tokens 4 --input-tokens 35 --slo-ttft 60 --slo-itl 60 --seed 5 "
        code = await run(served, f"{line} --json {tmp_path}/out/r.json --html {tmp_path}/out/r.html")
    assert code == 0
    result = json.loads((tmp_path / "out/r.json").read_text())
    assert result["seed"] == 5 and result["server"]["model"] == "a-model"
    assert result["server"]["max_model_len"] == 2048
    assert result["calibration"] == {"fixed": 5.0, "per_word": 2.0, "is_measured": True}
    assert result["request_fields"]["ignore_eos"] is False
    summary, records = result["summary"], result["records"]
    assert (summary["num_requests"], summary["num_answered"], summary["num_output_tokens"]) == (30, 30, 120)
    assert summary["num_prompt_tokens"] == 30 * 35 and summary["kept_share"] == 1.0
    assert len(records) == 30
    for record in records:
        assert record["due"] <= record["sent"] <= record["first"] <= record["last"] <= record["ended"]
        assert record["first"] - record["due"] >= 0.02 and record["error"] is None and record["pieces"] == 4
    assert [record["due"] for record in records] == sorted(record["due"] for record in records)
    output = capsys.readouterr().out
    for name in ("TTFT", "ITL", "TPOT", "end to end", "sent late", "goodput"):
        assert name in output


async def test_the_page_stands_by_itself(tmp_path):
    failures = {5: "busy", 9: "break", 11: "error event"}
    async with stand_in(delay=0.002, fails=lambda number, body: failures.get(number)) as served:
        await run(served, f"--rate 100 --num-requests 40 --slo-e2e 1 --html {tmp_path}/r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"(src|href)=|url\(|@import|<script|https?://(?!127)", text)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert "h1, p { overflow-wrap: anywhere; }" in text  # names of models may be long paths
    plots = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(plots) == 5 and all(attributes["role"] == "img" and attributes["aria-label"] for attributes in plots)
    assert not re.search(r"\bnan\b|\binf\b", text.lower())
    assert {"http 429", "broken off", "error event"} <= set(page.texts)
    for attributes in (attributes for tag, attributes in page.tags if tag == "path"):
        for number in re.findall(r"[ MHV](-?[\d.]+)", attributes["d"]):
            assert -1 <= float(number) <= 481  # nothing is drawn outside of its plot


async def test_failures_end_with_1_only_where_nothing_came(tmp_path, capsys):
    async with stand_in(fails=lambda number, body: "busy" if number > 3 else None) as served:
        assert (
            await run(served, f"--concurrency 2 --num-requests 6 --json {tmp_path}/r.json --html {tmp_path}/r.html")
            == 1
        )
        output = capsys.readouterr().out
    assert "http 429" in output and re.search(r"TTFT +0( +-){7}", output)
    summary = json.loads((tmp_path / "r.json").read_text())["summary"]
    assert summary["ttft"]["num_samples"] == 0
    # No time at all, not one of 0 that would keep every limit.
    assert (
        {summary["ttft"][name] for name in ("mean", "least", "most")}
        == {None}
        == set(summary["ttft"]["percentiles"].values())
    )
    assert Page((tmp_path / "r.html").read_text()).texts.count("-") >= 28
    async with stand_in(fails=lambda number, body: "busy" if number == 5 else None) as served:
        assert await run(served, "--concurrency 2 --num-requests 6 --slo-ttft 60") == 0
        served.fails = lambda number, body: "busy" if number % 2 else None
        unprepared = "--warm-up 0 --no-calibrate"
        assert await run(served, f"--concurrency 2 --num-requests 6 --slo-ttft 60 --fail-under {unprepared}") == 1


async def test_the_search_finds_what_a_server_can_do(tmp_path, capsys, monkeypatch):
    """The stand-in answers one request at a time in 25 ms, as a queue of one server does.

    In a trial of 0.5 s, request n of rate R waits n * (0.025 - 1 / R) and is to be answered in 0.25 s: nine tenths of
    80 cannot be, and all of 40 are, or of 20 where the machine is slow.
    """
    monkeypatch.setattr(trials, "_REST_SECONDS", 0.01)
    async with stand_in() as served:
        gate = asyncio.Semaphore(1)

        async def wait_for_turn(_: float) -> None:
            async with gate:
                await asyncio.sleep(0.025)

        served.wait = wait_for_turn
        line = (
            "--find-rate --rate 40 --duration 0.5 --precision 1 --arrivals constant --output-tokens 1 --slo-ttft 0.25"
        )
        code = await run(served, f"{line} --json {tmp_path}/r.json --html {tmp_path}/r.html --no-records --warm-up 0")
    assert code == 0
    search = json.loads((tmp_path / "r.json").read_text())["search"]
    assert 20 <= search["rate"] <= 62 and search["broken_rate"] / search["rate"] <= 2
    for end, is_kept in (("rate", True), ("broken_rate", False)):
        assert [trial["is_kept"] for trial in search["trials"] if trial["rate"] == search[end]].count(is_kept) == 2
    assert any(trial["is_given_up"] for trial in search["trials"])
    assert "keep the objective" in capsys.readouterr().out
    assert "Highest rate" in Page((tmp_path / "r.html").read_text()).texts


async def test_a_trial_begins_when_what_was_given_up_before_is_worked_off(monkeypatch, tmp_path):
    """The stand-in works on, 10 ms for each, for clients that have left."""
    monkeypatch.setattr(trials, "_REST_SECONDS", 0.01)
    num_open_at_start = []
    async with stand_in() as served:
        gate = asyncio.Semaphore(1)

        async def wait_for_turn(_: float) -> None:
            async with gate:
                await asyncio.sleep(0.01)

        def look(number, body):
            if body["max_tokens"] == 1 and served.bodies[number - 1]["max_tokens"] != 1:
                num_open_at_start.append(served.num_open)

        served.wait, served.fails = wait_for_turn, look
        line = "--find-rate --rate 400 --least-rate 200 --most-rate 400 --duration 1 --output-tokens 1 --slo-ttft 50ms"
        assert await run(served, f"{line} --arrivals constant --no-calibrate --json {tmp_path}/r.json") == 1
    search = json.loads((tmp_path / "r.json").read_text())["search"]
    assert [(trial["rate"], trial["is_given_up"]) for trial in search["trials"]] == [
        (400, True),
        (200, True),
        (200, True),
    ]
    for trial in search["trials"]:
        assert trial["share"] < 0.9 and "stopped" in {error["kind"] for error in trial["summary"]["errors"]}
    assert len(num_open_at_start) == 3 and max(num_open_at_start) == 1
    assert len({body["prompt"] for body in served.bodies}) == len(served.bodies)  # no trial finds another's in a cache


async def test_an_interrupted_search_reports_the_trials_that_were_over(tmp_path):
    """The stand-in answers the first trial and none after it."""
    async with stand_in(fails=lambda number, body: "never" if number >= 2 + 20 else None) as served:
        line = "--find-rate --slo-ttft 60 --rate 20 --duration 1 --arrivals constant --output-tokens 1 --no-calibrate"
        command = [sys.executable, "-m", "server.cli", "load-test", served.url, *line.split()]
        process = await asyncio.create_subprocess_exec(
            *command, "--json", str(tmp_path / "r.json"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        while len(served.bodies) < 2 + 20 + 5:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, _ = await process.communicate()
    result = json.loads((tmp_path / "r.json").read_text())
    assert process.returncode == 130 and b"20 sessions/s keep the objective" in output
    assert [trial["is_kept"] for trial in result["search"]["trials"]] == [True]
    assert result["search"]["rate"] == 20 and not result["search"]["is_complete"]
    assert result["summary"]["num_answered"] == 20 and any("interrupted" in note for note in result["notes"])


async def test_a_search_ends_with_what_it_knows_where_the_server_ends(tmp_path, monkeypatch):
    """The stand-in answers nothing any more once the first trial is lost."""
    monkeypatch.setattr(trials, "_REST_SECONDS", 0.01)
    async with stand_in(fails=lambda number, body: "busy" if number >= 2 else None) as served:
        line = "--find-rate --slo-ttft 60 --rate 20 --duration 1 --output-tokens 1 --no-calibrate"
        assert await run(served, f"{line} --json {tmp_path}/r.json") == 1
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["search"]["trials"]) == 1
    assert any("the search ended: the server answers no more (too many requests)" in note for note in result["notes"])


async def test_a_search_without_success_ends_with_1(capsys, monkeypatch):
    monkeypatch.setattr(trials, "_REST_SECONDS", 0.01)
    async with stand_in(first_delay=0.2) as served:
        line = "--find-rate --rate 20 --least-rate 20 --duration 1 --output-tokens 1 --slo-ttft 50ms"
        assert await run(served, line) == 1
    assert "No rate keeps the objective" in capsys.readouterr().out


async def test_a_server_that_refuses_the_first_request_is_told_with_what_may_help(capsys):
    async with stand_in(
        fails=lambda number, body: "busy" if body.get("stream_options") else None, has_usage=False
    ) as served:
        assert await run(served, "--num-requests 2") == 1
        assert "octavo: http 429: too many requests" in capsys.readouterr().err
        assert await run(served, "--num-requests 2 --no-usage --json -") == 0
    result = json.loads(capsys.readouterr().out)
    assert any("a word was taken for a token" in note for note in result["notes"])
    assert result["summary"]["output_tokens_by"] == "pieces of text" and result["summary"]["num_output_tokens"] == 128


@pytest.mark.parametrize(
    ("refusal", "code", "sentence"),
    [
        ('401 {"error": {"message": "no key"}}', 1, "octavo: http 401: no key (give --api-key, "),
        ("307 ", 1, "octavo: http 307: the server says to ask https://elsewhere/v1/models"),
        ('404 {"detail": "Not Found"}', 2, "octavo: The server does not list its models (Not Found): give --model."),
        ('200 {"models": []}', 2, "octavo: The server does not list its models (its list has another form): give "),
        ('200 {"data": []}', 2, "octavo: The server lists no model: give --model."),
    ],
)
async def test_a_server_that_names_no_model_is_told_with_what_may_help(capsys, refusal, code, sentence):
    async with stand_in(refusal_of_models=refusal) as served:
        assert await run(served, "--num-requests 2") == code
        error = capsys.readouterr().err
        assert error.startswith(sentence) and error.count("\n") == 1 and not served.bodies
        assert await run(served, "--num-requests 2 --model a-model") == 0


@pytest.mark.parametrize("way", ["flag", "file", "variable"])
async def test_keys_go_along_and_are_written_nowhere(tmp_path, monkeypatch, capsys, way):
    (tmp_path / "key").write_text("the-secret\n")
    flags = {"flag": "--api-key the-secret", "file": f"--api-key-file {tmp_path}/key", "variable": ""}
    if way == "variable":
        monkeypatch.setenv("OPENAI_API_KEY", "the-secret")
    async with stand_in() as served:
        await run(served, f"{flags[way]} --num-requests 2 --json {tmp_path}/r.json --html {tmp_path}/r.html")
    assert all("Authorization: Bearer the-secret" in head for head in served.heads) and served.heads
    output = capsys.readouterr()
    written = (tmp_path / "r.json").read_text() + (tmp_path / "r.html").read_text() + output.out + output.err
    assert "the-secret" not in written


async def test_a_load_that_is_to_start_in_the_past_is_refused(capsys):
    async with stand_in() as served:
        assert await run(served, f"--start-at {time.time() - 5} --rate 50 --num-requests 3 --warm-up 0") == 2
        assert "give a later --start-at" in capsys.readouterr().err
        assert len(served.bodies) == 2  # to count words


async def test_no_more_are_open_than_may_be():
    async with stand_in(first_delay=0.02) as served:
        line = "--rate 1000 --num-requests 6 --output-tokens 1 --warm-up 0"
        assert await run(served, f"{line} --max-concurrency 2") == 0
    assert served.most_open == 2


async def test_json_alone_goes_to_standard_output_as_to_a_file(capsys, tmp_path):
    async with stand_in() as served:
        assert await run(served, "--num-requests 2 --seed 1 --json -") == 0
        printed = capsys.readouterr().out
        assert await run(served, f"--num-requests 2 --seed 1 --json {tmp_path}/r.json") == 0
    written = (tmp_path / "r.json").read_text(encoding="utf-8")
    assert json.loads(printed).keys() == json.loads(written).keys()
    assert json.loads(printed)["summary"]["num_answered"] == 2 and printed[:10] == written[:10]


async def test_it_is_a_command_of_octavo(capsys):
    async with stand_in() as served:
        assert await run(served, "load-test --num-requests 3 --endpoint chat --turns 2", cli.main) == 0
    assert sum("messages" in body for body in served.bodies) == len(served.bodies) == 2 + 2 + 6
    assert "6 in 3 sessions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        ("load-test --rat 3", 2, "octavo: There is no flag --rat; did you mean --rate?"),
        ("load-test ftp://x", 2, "is not the URL of a server"),
        ("load-test http://127.0.0.1:1", 1, "octavo: connect: http://127.0.0.1:1 cannot be reached"),
        ("load-test http://127.0.0.1:1 --api-key-file /nowhere", 2, "/nowhere cannot be read"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_sentence(capsys, line, code, sentence):
    assert cli.main(line.split()) == code
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_help_lists_the_flags_and_needs_no_server(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["load-test", "--help"])
    assert ended.value.code == 0 and "--find-rate" in capsys.readouterr().out


def test_the_script_runs_without_an_installation(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy/load_test.py"), "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "usage: deploy/load_test.py" in done.stdout


def test_importing_the_command_loads_no_torch():
    code = "import server.load_test.command, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(0.0, 0.0)],
        [(1.0, 5.0)],
        [(0.0, 1e-9), (1e9, 1e9)],
        [(3.0, 7.0), (3.0, 7.0)],
        [(n, n * n) for n in range(5000)],
    ],
)
@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("kind", ["dots", "line", "steps"])
def test_plots_hold_for_any_points(points, is_log, kind):
    text = plot(
        "a <plot>", "x & y", "z", [Series("s<", points, kind), Series("t", points, "dots")], log_x=is_log, log_y=is_log
    )
    page = Page(text)
    assert "a <plot>" in page.texts and "nan" not in text
    for tag, attributes in page.tags:
        if tag == "path":
            for number in re.findall(r"[ MHVL](-?[\d.]+)", attributes["d"]):
                assert -1 <= float(number) <= 481


async def test_an_interrupted_load_is_reported_all_the_same(tmp_path):
    async with stand_in(fails=lambda number, body: "never" if number > 20 else None) as served:
        command = [
            sys.executable,
            "-m",
            "server.cli",
            "load-test",
            served.url,
            "--rate",
            "200",
            "--num-requests",
            "10000",
        ]
        process = await asyncio.create_subprocess_exec(
            *command, "--json", str(tmp_path / "r.json"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        while len(served.bodies) < 30 or served.num_open > len(served.bodies) - 21:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, _ = await process.communicate()
    result = json.loads((tmp_path / "r.json").read_text())
    assert process.returncode == 130 and b"TTFT" in output
    assert any("interrupted" in note for note in result["notes"])
    kinds = {error["kind"]: error["count"] for error in result["summary"]["errors"]}
    # Four came before the load: two to count words and two to warm up.
    summary = result["summary"]
    assert 0 < summary["num_answered"] <= 17 and kinds.keys() == {"stopped"} and kinds["stopped"] >= 9
    assert summary["num_answered"] + kinds["stopped"] == summary["num_requests"] == len(result["records"]) < 10_000
