"""`python -m scheduler.simulate`: what it prints, what it writes, and what it refuses."""

import json
import subprocess
import sys

import pytest

from scheduler.simulate.__main__ import main
from tests import data_files
from tests.scheduler.test_simulate_traces import AZURE, CODING_ASSISTANT, MOONCAKE, SERVEGEN

SMALL = ("--no-progress", "--num-blocks", "4096", "--output-scale", "0.05")


def simulated(capsys, *arguments, status=0):
    assert main([*map(str, arguments), *SMALL, "--json", "-"]) == status
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize(
    "arguments",
    [
        (MOONCAKE, "--tokens-per-run", 16, "--first", 60),
        (CODING_ASSISTANT, "--tokens-per-run", 4),
        (AZURE, "--first", 50, "--rate", 10),
        (f"{SERVEGEN}#deepseek-r1:300", "--rate", 0.5),
    ],
    ids=["mooncake", "coding", "azure", "servegen"],
)
def test_each_kind_of_trace_is_replayed(capsys, arguments):
    report, tables = simulated(capsys, *arguments)
    assert report["num_answered"] == report["num_requests"] > 0
    assert report["ttft"]["percentiles"]["p50"] <= report["ttft"]["percentiles"]["p99"]
    assert "roofline of llama-3.1-8b" in report["cost"]
    assert "prefix hit rate" in tables and "first token" in tables


def test_the_report_can_go_to_a_file(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main([str(AZURE), *SMALL, "--first", "5", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["num_answered"] == 5
    assert "Latency" in capsys.readouterr().out


def test_replicas_are_found_for_an_objective(capsys):
    arguments = (AZURE, "--first", 120, "--rate", 1000, "--slo-ttft", 0.8, "--slo-percentile", 90)
    sizing, tables = simulated(capsys, *arguments)
    assert sizing["num_replicas"] > 1
    chosen = next(trial for trial in sizing["trials"] if trial["num_replicas"] == sizing["num_replicas"])
    assert chosen["is_met"] and chosen["report"]["ttft"]["percentiles"]["p90"] <= 0.8
    assert f"Needed: {sizing['num_replicas']} replicas" in tables
    unmet, tables = simulated(capsys, *arguments[:-3], 0.0, "--max-replicas", 2, status=1)
    assert unmet["num_replicas"] is None and "Not even 2 replicas" in tables


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("none.jsonl",), "cannot be read"),
        ((AZURE, "--num-blocks", "many"), "--num-blocks takes"),
        ((AZURE, "--model", "llama-3.1-70b", "--card", "l4"), "does not fit 1 x l4"),
        ((AZURE, "--cost-model", "none.json"), "holds no cost model"),
        ((AZURE, "--tokens-per-run", "4"), "--tokens-per-run"),
        ((MOONCAKE, "--sample", "0.000001"), "Nothing of the trace is left"),
        ((AZURE, "--max-model-len", "1"), "No request of the trace fits"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(capsys, arguments, says):
    assert main([*map(str, arguments), "--no-progress"]) == 2
    out, err = capsys.readouterr()
    assert says in err and not out


@pytest.mark.parametrize("option", [("--block-size", "0"), ("--sample", "2"), ("--rate", "nan"), ("--replicas", "x")])
def test_numbers_out_of_range_are_refused(capsys, option):
    with pytest.raises(SystemExit, match="2"):
        main([str(AZURE), *option])
    assert option[0] in capsys.readouterr().err


def test_the_simulator_needs_no_torch():
    code = "import scheduler.simulate.__main__, sys; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=data_files.DATA_DIR.parent.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
