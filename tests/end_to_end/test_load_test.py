"""The load test against the real server: both count the same tokens, and a trace shares what it says."""

import json

import pytest

from scheduler.simulate.trace_files import read_trace
from server import cli
from tests.end_to_end.server_process import ServerProcess
from tests.end_to_end.tiny_tokenizer import save_tokenizer
from tests.models.tiny_models import SIZES, build, save

BLOCK_SIZE = 4
IDS = f"3-{SIZES['vocab_size'] - 1}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("loaded")
    save(build("llama"), path)
    save_tokenizer(path, SIZES["vocab_size"])
    flags = ("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "2048", "--cpu-threads", "1")
    with ServerProcess(path, *flags, "--served-model-name", "tested") as running:
        yield running


def load_test(server, tmp_path, *flags):
    path = tmp_path / "result.json"
    assert cli.main(["load-test", server.url, *flags, "--json", str(path), "--no-progress"]) == 0
    return json.loads(path.read_text())


def test_the_cache_finds_what_a_trace_shares(server, tmp_path):
    """With answers of one token after whole prompts, the trace's own ids say exactly what a cache can find."""
    shared, own = [1, 2, 3, 4], iter(range(100, 1000))
    rows = [
        {"timestamp": 1000 * number, "input_length": 512 * len(runs) - 100, "output_length": 1, "hash_ids": runs}
        for number, runs in enumerate([[*shared[: 1 + number % 4], next(own)] for number in range(24)])
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = load_test(
        server, tmp_path, "--trace", str(trace), "--tokens-per-run", "8", "--prompt-ids", IDS, "--concurrency", "1"
    )
    summary = result["summary"]
    expected = read_trace(trace).scaled(8)
    assert summary["num_prompt_tokens"] == expected.num_prompt_tokens
    limit = expected.hit_rate_limit(BLOCK_SIZE)
    assert summary["num_cached_tokens"] / summary["num_prompt_tokens"] == pytest.approx(limit) and limit > 0.4


def test_both_count_the_same_tokens_and_requests(server, tmp_path):
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
    before = [server.metric(name) for name in names]
    result = load_test(
        server,
        tmp_path,
        *("--rate", "30", "--num-requests", "25", "--input-tokens", "5-40", "--output-tokens", "2-9", "--ignore-eos"),
        *("--prompt-ids", IDS, "--warm-up", "0"),
    )
    counted = [server.metric(name) - was for name, was in zip(names, before, strict=True)]
    summary = result["summary"]
    assert counted == [summary["num_prompt_tokens"], summary["num_output_tokens"], 25]
    assert summary["num_answered"] == 25 and summary["output_tokens_by"] == "usage"
    assert summary["num_output_tokens"] == summary["num_wanted_tokens"]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_prompts_of_words_get_the_lengths_that_were_asked_for(smollm2, tmp_path, endpoint):
    flags = ("--endpoint", endpoint, "--num-requests", "6", "--input-tokens", "120", "--output-tokens", "2")
    result = load_test(smollm2, tmp_path, *flags)
    assert result["calibration"]["is_measured"]
    assert [record["prompt_tokens"] for record in result["records"]] == pytest.approx([120] * 6, abs=1)
