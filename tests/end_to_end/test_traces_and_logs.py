"""Traces and JSON lines of a real engine: they agree with the answers, with each other, and with the order of time.

On a tiny model, in a pool too small for what runs at once, so that some sequences are preempted.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.end_to_end.server_process import ServerProcess, wait_until
from tests.end_to_end.tiny_tokenizer import save_tokenizer
from tests.models.tiny_models import SIZES, build, save
from tests.server.test_tracing_export import Collector, collecting, values

FLAGS = {
    "--log-format": "json",
    "--max-num-seqs": 6,
    "--max-num-batched-tokens": 16,
    "--block-size": 4,
    "--num-gpu-blocks-override": 24,
    "--cpu-threads": 1,
}
PROMPT = [3 + (place * 7) % 40 for place in range(13)]
NUM_REQUESTS = 8


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("traced")
    save(build("llama"), path)
    save_tokenizer(path, SIZES["vocab_size"])
    flags = [part for flag, value in FLAGS.items() for part in (flag, str(value))]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with ServerProcess(
            path, *flags, "--otlp-traces-endpoint", collector.url, "--served-model-name", "tested"
        ) as running:
            yield running


def lines(server: ServerProcess) -> list[dict]:
    return [json.loads(line) for line in server.log().splitlines()]


def request_spans(collector: Collector) -> dict[str, object]:
    """By the request ids that callers gave."""
    spans = (span for span in collector.spans if span.kind == span.SPAN_KIND_SERVER)
    return {str(values(span.attributes).get("gen_ai.request.id")): span for span in spans}


async def ask(client: httpx.AsyncClient, name: str, **body: object) -> dict:
    asked = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "temperature": 0, **body}
    answered = await client.post("/v1/completions", json=asked, headers={"x-request-id": name})
    return answered.json()


async def test_spans_and_lines_tell_the_same_as_the_answers(server, collector):
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        names = [f"r{number}" for number in range(NUM_REQUESTS)]
        answers = dict(zip(names, await asyncio.gather(*(ask(client, name) for name in names)), strict=True))
    wait_until(lambda: set(names) <= request_spans(collector).keys())
    ended = {line["request_id"]: line for line in lines(server) if line["logger"] == "octavo.ended"}
    num_preemptions = 0
    for name, answer in answers.items():
        span = request_spans(collector)[name]
        told = values(span.attributes)
        usage = answer["usage"]
        assert told["gen_ai.response.id"] == ended[name]["id"] == answer["id"]
        for attribute, field, number in (
            ("gen_ai.usage.input_tokens", "prompt_tokens", usage["prompt_tokens"]),
            ("gen_ai.usage.output_tokens", "completion_tokens", usage["completion_tokens"]),
            (
                "gen_ai.usage.cache_read.input_tokens",
                "cached_tokens",
                usage["prompt_tokens_details"]["cached_tokens"],
            ),
        ):
            assert told[attribute] == ended[name][field] == number
        assert (ended[name]["trace_id"], ended[name]["span_id"]) == (span.trace_id.hex(), span.span_id.hex())
        phases = [child for child in collector.spans if child.parent_span_id == span.span_id]
        phases.sort(key=lambda child: (child.start_time_unix_nano, child.end_time_unix_nano))
        assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
        borders = [moment for each in phases for moment in (each.start_time_unix_nano, each.end_time_unix_nano)]
        assert [span.start_time_unix_nano, *borders, span.end_time_unix_nano] == sorted(
            [span.start_time_unix_nano, *borders, span.end_time_unix_nano]
        )
        assert borders[1::2][:-1] == borders[2::2]
        events = [event for phase in phases for event in phase.events]
        assert len(events) == told["octavo.num_preemptions"] == ended[name]["preemptions"]
        num_preemptions += len(events)
    assert num_preemptions > 0


async def test_an_engine_that_dies_leaves_an_error_and_nothing_but_objects(server, collector):
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        asking = asyncio.create_task(ask(client, "lost", prompt=[PROMPT] * 32, max_tokens=32, n=128))  # much to do
        await asyncio.to_thread(wait_until, lambda: server.metric("vllm:num_requests_running") > 0)
        os.kill(server.engine_process_id(), signal.SIGKILL)
        with suppress(httpx.HTTPError):
            assert (await asking)["error"]["code"] == "engine_died"
    await asyncio.to_thread(wait_until, lambda: "lost" in request_spans(collector))
    span = request_spans(collector)["lost"]
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert values(span.attributes)["error.type"] == "503"
    await asyncio.to_thread(wait_until, server.is_ready)
    said = lines(server)
    assert {line["process"] for line in said} <= {"server", "engine", "preparer"}
    died = next(line for line in said if line["logger"] == "octavo.engine_client" and line["level"] == "error")
    assert died["message"].startswith("The engine process died (signal 9).")
    access = next(line for line in said if line["logger"] == "octavo.access" and line["request_id"] == "lost")
    assert (access["status"], access["trace_id"]) == (503, span.trace_id.hex())
