"""All series together: there from the start, scraped beside the loop, in step with what `usage` tells, documented."""

import asyncio
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from scheduler.output import SequenceUpdate
from scheduler.request_report import RequestReport
from server import metrics
from server.messages import EngineStats
from server.metrics import SequenceRecord
from tests.server.doubles import FakeEngine, client_of, make_app, report_of, says
from tests.server.test_disconnect import Client
from tests.server.test_operations import LABELS, metrics_of

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
COMPLETIONS = "/v1/completions"


# What boards and rules for vLLM ask for (its vllm/v1/metrics/loggers.py, and names that older releases had), with the
# labels beyond those of all series.
VLLM_SERIES = {
    "gauge": {
        **dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), ()),
        **dict.fromkeys(("gpu_cache_usage_perc", "cpu_cache_usage_perc"), ()),
        "num_requests_waiting_by_reason": ("reason",),
        "engine_sleep_state": ("sleep_state",),
        "lora_requests_info": ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    },
    "counter": {
        **dict.fromkeys(("prompt_tokens", "prompt_tokens_cached", "prompt_tokens_recomputed", "generation_tokens"), ()),
        **dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "gpu_prefix_cache_queries"), ()),
        **dict.fromkeys(("gpu_prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits"), ()),
        **dict.fromkeys(("mm_cache_queries", "mm_cache_hits", "num_preemptions", "corrupted_requests"), ()),
        **dict.fromkeys(("spec_decode_num_drafts", "spec_decode_num_draft_tokens"), ()),
        "spec_decode_num_accepted_tokens": (),
        "spec_decode_num_accepted_tokens_per_pos": ("position",),
        **dict.fromkeys(("prompt_tokens_by_source", "prompt_tokens_cached_by_source"), ("source",)),
        "request_success": ("finished_reason",),
        "admission_rejections": ("reason",),
    },
    "histogram": {
        **dict.fromkeys(("request_prompt_tokens", "request_generation_tokens", "request_params_n"), ()),
        **dict.fromkeys(("request_max_num_generation_tokens", "request_params_max_tokens"), ()),
        **dict.fromkeys(("request_prefill_kv_computed_tokens", "iteration_tokens_total"), ()),
        **dict.fromkeys(("time_to_first_token_seconds", "inter_token_latency_seconds"), ()),
        **dict.fromkeys(("time_per_output_token_seconds", "request_time_per_output_token_seconds"), ()),
        **dict.fromkeys(("e2e_request_latency_seconds", "request_queue_time_seconds"), ()),
        **dict.fromkeys(("request_inference_time_seconds", "request_prefill_time_seconds"), ()),
        "request_decode_time_seconds": (),
    },
}


def shape(series: dict) -> set:
    """Names and labels. What labels say about the engine is known once it is there: of those the names count."""
    return {
        (name, *((key, "") if name.endswith("_info") else (key, v) for key, v in labels)) for name, *labels in series
    }


class StartingEngine(FakeEngine):
    """Has said nothing yet, until it is ready."""

    is_loading = True

    @property
    def stats(self) -> EngineStats | None:
        return None if self.is_loading else super().stats


async def test_no_series_comes_or_goes_between_the_start_and_after_a_load():
    engine = StartingEngine(says("hello"))
    info, engine.info = engine.info, None
    keys = {"api_key": ("ann:one", "bob:two"), "admin_api_key": "three"}
    async with client_of(make_app(engine, **keys), headers={"Authorization": "Bearer three"}) as client:
        before = await metrics_of(client)
        engine.is_loading, engine.info = False, info
        assert shape(await metrics_of(client)) == shape(before)
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            chat = {"messages": [{"role": "user", "content": "a"}], "stream": True}
            assert (await client.post("/v1/chat/completions", json=chat, headers=headers)).status_code == 200
            for body, status in (({"prompt": "ab", "n": 2}, 200), ({"prompt": ""}, 400)):
                assert (await client.post(COMPLETIONS, json=body, headers=headers)).status_code == status
            assert (await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)).status_code == 200
        engine.is_down = True
        assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 503
        assert (await client.post(COMPLETIONS, json={"prompt": "a"}, headers={"Authorization": "x"})).status_code == 401
        after = await metrics_of(client)
    assert shape(after) == shape(before)
    assert before["octavo_engine_ready", *LABELS] == 0


async def test_boards_for_vllm_find_their_series():
    async with client_of(make_app(FakeEngine())) as client:
        families = list(text_string_to_metric_families((await client.get("/metrics")).text))
    shown = {family.name: family for family in families}
    for kind, expected in VLLM_SERIES.items():
        for name, labels in expected.items():
            family = shown[f"vllm:{name}"]
            assert family.type == kind, name
            beyond = {label for sample in family.samples for label in sample.labels} - {"le"}
            assert beyond == {"model_name", "engine", *labels}, name
    # Labels that a rule may compare with.
    for name, label, values in (
        ("vllm:request_success", "finished_reason", {"stop", "length", "abort", "error", "repetition"}),
        ("vllm:engine_sleep_state", "sleep_state", {"awake", "weights_offloaded", "discard_all"}),
        ("vllm:num_requests_waiting_by_reason", "reason", {"capacity", "deferred"}),
    ):
        assert {sample.labels[label] for sample in shown[name].samples} == values


async def test_the_loop_goes_on_while_a_scrape_is_written(monkeypatch):
    began, proceed, render = threading.Event(), threading.Event(), metrics.render

    def slow(snapshots):
        began.set()
        assert proceed.wait(60)
        return render(snapshots)

    monkeypatch.setattr(metrics, "render", slow)
    async with client_of(make_app(FakeEngine(says("hello")))) as client:
        scrape = asyncio.create_task(metrics_of(client))
        await asyncio.to_thread(began.wait, 60)
        answer = await client.post(COMPLETIONS, json={"prompt": "abc"})  # or this would wait for ever
        assert answer.json()["choices"][0]["text"] == "hello"
        assert not scrape.done()
        proceed.set()
        series, later = await scrape, await metrics_of(client)
    assert series["vllm:generation_tokens_total", *LABELS] == 0  # as it was when the scrape began
    assert later["vllm:generation_tokens_total", *LABELS] == 6


async def test_a_scrape_is_packed_for_those_who_can_read_it():
    async with client_of(make_app(FakeEngine())) as client:
        plain = await client.get("/metrics", headers={"Accept-Encoding": "identity"})
        packed = await client.get("/metrics", headers={"Accept-Encoding": "br, gzip;q=0.5"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 5

    def names(text: str) -> list[str]:
        return [line.rpartition(" ")[0] for line in text.splitlines()]

    assert names(packed.text) == names(plain.text)


async def test_who_waits_and_who_gives_way_is_told_by_key():
    def report(message, has_ended):
        return replace(report_of(message, has_ended), num_preemptions=len(message.prompt_token_ids))

    engine = FakeEngine(says("hello"))
    engine.report_of = report
    async with client_of(make_app(engine, api_key=("ann:one", "bob:two"))) as client:
        for key, prompt in (("one", ["abc", "de"]), ("two", "f")):
            client.headers["Authorization"] = f"Bearer {key}"
            assert (await client.post(COMPLETIONS, json={"prompt": prompt})).status_code == 200
        series = await metrics_of(client)
    told = {
        name: [series[f"octavo_key_{name}_total", LABELS[0], ("key", key), LABELS[1]] for key in ("ann", "bob")]
        for name in ("requests", "prompts", "queue_seconds", "preemptions")
    }
    assert told == {"requests": [1, 1], "prompts": [2, 1], "queue_seconds": [2, 1], "preemptions": [5, 1]}


async def test_an_aborted_answer_counts_what_its_usage_would_have_said():
    app = make_app(FakeEngine(says("x" * 200)), api_key=("ann:one",))
    body = {"prompt": ["abc", "defg"], "n": 2, "stream": True, "max_tokens": 200}
    client = Client(app, COMPLETIONS, {**body, "stream_options": {"continuous_usage_stats": True}}, key="one")
    await client.wait_for_messages(9)
    client.gone.set()
    await client.served
    usages = [json.loads(event)["usage"] for event in re.findall(r"data: (\{.*\})\n", client.text())]
    async with client_of(app, headers={"Authorization": "Bearer one"}) as scraper:
        series = await metrics_of(scraper)
    of_ann = [LABELS[0], ("key", "ann"), LABELS[1]]
    # A token that came while the client left was written into a closed connection, for each of the four answers.
    told = usages[-1]["completion_tokens"]
    assert told > 0
    assert told <= series["octavo_key_generation_tokens_total", *of_ann] <= told + 4
    assert series["octavo_key_prompt_tokens_total", *of_ann] == 3 + 4 == usages[-1]["prompt_tokens"]
    assert series["octavo_key_requests_total", *of_ann] == 1
    assert series["vllm:request_success_total", LABELS[0], ("finished_reason", "abort"), LABELS[1]] == 4


async def test_what_a_failed_answer_had_is_counted_and_a_prompt_that_was_never_begun_is_not():
    engine = FakeEngine(says("hello"))
    engine.num_cached_tokens = 2
    engine.dies_after = 3
    async with client_of(make_app(engine)) as client:
        stream = await client.post(COMPLETIONS, json={"prompt": "abc", "stream": True})
        assert "engine_died" in stream.text
        engine.dies_after = 0
        assert (await client.post(COMPLETIONS, json={"prompt": "abcdef"})).status_code == 503
        assert (await client.post("/v1/embeddings", json={"input": "abcdef"})).status_code in (200, 503)
        series = await metrics_of(client)
    assert series["vllm:prompt_tokens_total", *LABELS] == 3
    assert series["vllm:prompt_tokens_cached_total", *LABELS] == 2
    assert series["vllm:generation_tokens_total", *LABELS] == 3
    key = ("key", "none")
    assert series["octavo_key_prompt_tokens_total", LABELS[0], key, LABELS[1]] == 3
    assert series["octavo_key_requests_total", LABELS[0], key, LABELS[1]] == 3


async def test_tokens_that_come_with_the_end_of_a_stop_string_are_not_counted():
    async with client_of(make_app(FakeEngine(says("hello world"), chunks=(20,)))) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "abc", "stop": ["lo"]})
        series = await metrics_of(client)
    usage = answer.json()["usage"]
    assert series["vllm:generation_tokens_total", *LABELS] == usage["completion_tokens"] == len("hello")


class SecondFirst(FakeEngine):
    """Of two answers to a prompt the second one begins, and nothing follows."""

    async def _run(self, message, stream):
        await asyncio.sleep(0)
        stream.put(SequenceUpdate(message.request_id, 1, token_ids=(120,)))
        await asyncio.Event().wait()


async def test_a_prompt_counts_whichever_of_its_answers_has_begun():
    app = make_app(SecondFirst())
    client = Client(app, COMPLETIONS, {"prompt": "abcd", "n": 2, "stream": True})
    await client.wait_for_messages(2)
    client.gone.set()
    await client.served
    async with client_of(app) as scraper:
        series = await metrics_of(scraper)
    assert series["vllm:prompt_tokens_total", *LABELS] == 4
    assert series["vllm:generation_tokens_total", *LABELS] == 1


async def test_what_is_observed_stands_under_its_name():
    app = make_app(FakeEngine())
    metrics = app.state.edge.metrics
    metrics.observe_report(
        RequestReport(
            "r-0",
            "",
            0,
            "finished",
            arrival_time=100.0,
            queued_time=101.0,
            report_time=140.0,
            num_prompt_tokens=50,
            wait_seconds={},
            admitted_time=103.0,
            first_token_time=107.0,
            ended_time=119.0,
            num_cached_tokens=16,
            num_generated_tokens=40,
            max_generated_tokens=30,
        )
    )
    metrics.observe_end(SequenceRecord("stop", 50, 31, 64, latency=20.0, decode_time=12.0))
    metrics.observe_first_token(8.0)
    metrics.observe_inter_token(0.5)
    metrics.observe_loop_lag(0.25)
    metrics.observe_n(3)
    async with client_of(app) as client:
        series = await metrics_of(client)
    observed = {
        name.removesuffix("_sum"): value
        for (name, *labels), value in series.items()
        if name.endswith("_sum") and value and tuple(labels) == LABELS
    }
    assert observed == {
        "vllm:request_queue_time_seconds": 2.0,
        "vllm:request_prefill_time_seconds": 4.0,
        "vllm:request_inference_time_seconds": 16.0,
        "vllm:request_prefill_kv_computed_tokens": 34,
        "vllm:request_max_num_generation_tokens": 30,
        "vllm:e2e_request_latency_seconds": 20.0,
        "vllm:request_prompt_tokens": 50,
        "vllm:request_generation_tokens": 31,
        "vllm:request_params_max_tokens": 64,
        "vllm:request_decode_time_seconds": 12.0,
        "vllm:request_time_per_output_token_seconds": 0.4,
        "vllm:time_to_first_token_seconds": 8.0,
        "vllm:inter_token_latency_seconds": 0.5,
        "vllm:time_per_output_token_seconds": 0.5,
        "octavo_event_loop_lag_seconds": 0.25,
        "vllm:request_params_n": 3,
    }


async def test_facts_are_those_that_the_engine_chose():
    engine = FakeEngine()
    chosen = {"quantization": "int8", "attention_backend": "some", "device": "cuda:1", "max_model_len": 99}
    chosen |= {"max_num_seqs": 7, "max_num_batched_tokens": 77, "num_blocks": 777, "async_scheduling": True}
    engine.info = msgspec.structs.replace(engine.info, dtype="float8", **chosen)
    settings = {"enable_prefix_caching": False, "block_size": 32, "gpu_memory_utilization": 0.5}
    async with client_of(make_app(engine, **settings)) as client:
        series = await metrics_of(client)
    told = {name: dict(labels) for name, *labels in series if name.endswith("config_info")}
    common = dict(LABELS) | {"block_size": "32", "enable_prefix_caching": "False"}
    assert told == {
        "octavo_config_info": {
            **common,
            "model": "byte-model",
            "kv_cache_dtype": "float8",
            **{name: str(value) for name, value in chosen.items()},
        },
        "vllm:cache_config_info": {
            **common,
            "num_gpu_blocks": "777",
            "cache_dtype": "float8",
            "gpu_memory_utilization": "0.5",
        },
    }


async def test_the_page_names_every_family_with_its_type_and_its_labels():
    rows = re.findall(r"^\| `([^`{]+)(?:\{([^`]*)\})?` \| (\w+) \|", PAGE.read_text(), flags=re.MULTILINE)
    documented = {name: (kind, set(filter(None, labels.split(",")))) for name, labels, kind in rows}
    async with client_of(make_app(FakeEngine(says("hello")))) as client:
        await client.post(COMPLETIONS, json={"prompt": "abc"})
        text = (await client.get("/metrics")).text
    shown: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        labels = {label for sample in family.samples for label in sample.labels} - {"le", "quantile"}
        assert family.name.startswith(("http_", "process_", "python_")) or labels >= {"model_name", "engine"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        shown[name] = family.type, labels - {"model_name", "engine"}
    assert documented == shown
