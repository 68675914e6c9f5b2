"""Health, keys, request ids and metrics of the application."""

import logging
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.messages import EngineStats
from tests.server.doubles import FakeEngine, client_of, make_app, says

_ROUTES = [
    ("GET", "/health/live/"),
    ("GET", "/health/other"),
    ("GET", "/healthy"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/byte-model"),
    ("GET", "/v1/requests/cmpl-1"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/nothing"),
]


@pytest.mark.parametrize("path", ["/health/ready", "/health"])
async def test_readiness_follows_the_engine(path):
    engine = FakeEngine()
    async with client_of(make_app(engine)) as client:
        assert (await client.get(path)).status_code == 200
        engine.is_hung = True
        assert (await client.get(path)).json() == {"status": "engine unavailable"}
        engine.draining = True
        response = await client.get(path)
        assert (response.status_code, response.json()) == (503, {"status": "draining"})
        engine.draining, engine.info = False, None
        response = await client.get(path)
        assert (response.status_code, response.json()) == (503, {"status": "loading"})
        assert (await client.get("/health/live")).status_code == 200


async def test_models_are_listed_while_the_engine_loads():
    engine = FakeEngine()
    async with client_of(make_app(engine)) as client:
        card = (await client.get("/v1/models")).json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("byte-model", 256)
        engine.info = None
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] is None


@pytest.mark.parametrize(("method", "path"), _ROUTES)
async def test_every_route_but_health_needs_a_key(method, path):
    async with client_of(make_app(FakeEngine(), api_key=("one", "zw\u00f6lf"))) as client:
        for header in (None, "Bearer", "Bearer ", "Bearer two", "Bearer onee", "Basic one", "one", "Bearer one two"):
            response = await client.request(method, path, headers={} if header is None else {"Authorization": header})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("Bearer one", "bearer one", "Bearer zw\u00f6lf"):
            response = await client.request(method, path, headers={"Authorization": key.encode()})
            assert response.status_code != 401


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
@pytest.mark.parametrize(
    "keys", [{"api_key": ("one",)}, {"admin_api_key": "root"}, {"api_key": ("a",), "admin_api_key": "b"}]
)
async def test_health_needs_no_key_and_tells_nothing_else(path, keys):
    """As load balancers and kubelets ask, which have none."""
    engine = FakeEngine()
    async with client_of(make_app(engine, **keys)) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = await client.get(path, headers=headers)
            assert (answer.status_code, list(answer.json())) == (200, ["status"])
            assert (await client.head(path, headers=headers)).status_code == 200
        engine.info = None
        answer = await client.get(path)
        expected = (200, {"status": "live"}) if path == "/health/live" else (503, {"status": "loading"})
        assert (answer.status_code, answer.json()) == expected
        assert (await client.post(path)).status_code == 405


async def test_request_ids_go_in_and_out(caplog):
    caplog.set_level(logging.INFO, logger="octavo.access")
    async with client_of(make_app(FakeEngine())) as client:
        given = await client.get("/v1/models", headers={"X-Request-Id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
        for bad in ("", "x" * 129, "a b", "a\u00e9"):
            response = await client.get("/v1/models", headers={"X-Request-Id": bad.encode()})
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
        failed = await client.get("/nothing%0d%0ahere")
        assert "x-request-id" in failed.headers
    lines = [record.getMessage() for record in caplog.records]
    assert "GET /v1/models 200" in lines[0]
    assert "id=abc-1" in lines[0]
    assert "GET /nothing%0D%0Ahere 404" in lines[-1]


async def metrics_of(client) -> dict:
    text = (await client.get("/metrics")).text
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


LABELS = (("engine", "0"), ("model_name", "byte-model"))


async def test_series_exist_before_the_first_request():
    async with client_of(make_app(FakeEngine())) as client:
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        series = await metrics_of(client)
    names = (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
        *("vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count"),
        *("vllm:e2e_request_latency_seconds_count", "vllm:request_time_per_output_token_seconds_count"),
        *("vllm:request_prompt_tokens_count", "vllm:request_generation_tokens_count", "vllm:request_params_n_count"),
        *("vllm:request_queue_time_seconds_count", "vllm:request_prefill_time_seconds_count"),
        *("vllm:request_inference_time_seconds_count", "vllm:request_max_num_generation_tokens_count"),
        *("vllm:request_prefill_kv_computed_tokens_count", "vllm:prompt_tokens_cached_total"),
        *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    )
    for name in (*names, "octavo_kv_cache_integrity_failures_total"):
        assert (name, *LABELS) in series, name
    for reason in ("stop", "length", "abort", "error"):
        assert series["vllm:request_success_total", LABELS[0], ("finished_reason", reason), LABELS[1]] == 0
    assert series["vllm:kv_cache_usage_perc", *LABELS] == 0.25
    info = next(key for key in series if key[0] == "vllm:cache_config_info")
    assert {("block_size", "16"), ("num_gpu_blocks", "64"), ("cache_dtype", "float32")} <= set(info)
    assert ("enable_prefix_caching", "True") in info


async def test_series_before_the_engine_is_there():
    class LoadingEngine(FakeEngine):
        stats = None

    engine = LoadingEngine()
    engine.info = None
    async with client_of(make_app(engine)) as client:
        series = await metrics_of(client)
    assert series["vllm:generation_tokens_total", *LABELS] == 0
    assert series["vllm:kv_cache_usage_perc", *LABELS] == 0


async def test_what_the_engine_counts_is_told_as_boards_read_it():
    class BusyEngine(FakeEngine):
        stats = EngineStats(
            num_running=3,
            num_waiting=10,
            num_blocks=100,
            num_used_blocks=40,
            num_steps=1,
            num_preemptions=2,
            num_prompt_tokens=1000,
            num_generation_tokens=5,
            num_recomputed_tokens=6,
            num_prefix_queries=900,
            num_prefix_hits=300,
            num_swapped_out_blocks=7,
            num_swapped_in_blocks=8,
            num_dropped_queue_full=9,
            num_dropped_queue_timeout=10,
            num_dropped_deadline=11,
            num_deferred=4,
            num_queued_tokens=12,
            num_starving=13,
            num_cached_blocks=14,
            num_evicted_blocks=15,
            num_saved_blocks=16,
            num_host_blocks=20,
            num_used_host_blocks=5,
            num_evictable_blocks=12,
            num_recomputed_prompt_tokens=4,
            num_shared_blocks=17,
            num_copied_blocks=18,
            num_empty_slots=160,
            step_seconds={"schedule": 0.5, "execute": 2.0},
            step_token_counts=(1, 0, 2, *(0,) * 10, 3),
            num_step_tokens=90_000,
        )

    async with client_of(make_app(BusyEngine())) as client:
        series = await metrics_of(client)
    plain = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 10,
        "vllm:kv_cache_usage_perc": 0.4,
        "vllm:num_preemptions_total": 2,
        "octavo_engine_prompt_tokens_total": 1000,
        "vllm:prefix_cache_queries_total": 900,
        "vllm:prefix_cache_hits_total": 300,
        "octavo_engine_generation_tokens_total": 5,
        "vllm:prompt_tokens_recomputed_total": 4,
        "octavo_kv_blocks_shared": 17,
        "octavo_kv_blocks_copied_total": 18,
        "octavo_kv_waste_perc": 160 / (40 * 16),
        "vllm:iteration_tokens_total_sum": 90_000,
        "vllm:iteration_tokens_total_count": 6,
        "octavo_kv_blocks_swapped_out_total": 7,
        "octavo_kv_blocks_swapped_in_total": 8,
        "octavo_num_queued_prompt_tokens": 12,
        "octavo_num_requests_starving": 13,
        "octavo_kv_blocks_cached": 14,
        "octavo_kv_blocks_evicted_total": 15,
        "octavo_kv_blocks_saved": 16,
        "octavo_kv_host_usage_perc": 0.25,
        "octavo_recomputed_tokens_total": 6,
        "octavo_engine_steps_total": 1,
        "octavo_engine_ready": 1,
        "octavo_engine_restarts_total": 0,
        "octavo_open_requests": 0,
        "vllm:gpu_cache_usage_perc": 0.4,
        "vllm:cpu_cache_usage_perc": 0.25,
        "vllm:gpu_prefix_cache_queries_total": 900,
        "vllm:gpu_prefix_cache_hits_total": 300,
    }
    assert {name: series[name, *LABELS] for name in plain} == plain
    labelled = {
        ("vllm:num_requests_waiting_by_reason", "reason"): {"capacity": 6, "deferred": 4},
        ("vllm:admission_rejections_total", "reason"): {"queue_full": 9},
        ("octavo_kv_blocks", "state"): {"free": 48, "cached": 12, "used": 40},
        ("octavo_step_seconds_total", "part"): {"schedule": 0.5, "execute": 2, "update": 0, "between": 0},
        ("vllm:iteration_tokens_total_bucket", "le"): {"1.0": 1, "8.0": 1, "16.0": 3, "16384.0": 3, "+Inf": 6},
        ("octavo_requests_dropped_total", "cause"): {"queue_full": 9, "queue_timeout": 10, "deadline": 11},
    }
    for (name, label), values in labelled.items():
        assert {value: series[name, *sorted([*LABELS, (label, value)])] for value in values} == values


async def test_buckets_hold_those_of_existing_boards():
    async with client_of(make_app(FakeEngine())) as client:
        series = await metrics_of(client)
    edges: dict[str, set[float]] = {}
    for name, *labels in series:
        if name.endswith("_bucket"):
            edges.setdefault(name.removesuffix("_bucket"), set()).add(float(dict(labels)["le"]))
    first_token = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
    per_token = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
    request = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
    for name, expected in (
        ("vllm:time_to_first_token_seconds", first_token),
        ("vllm:inter_token_latency_seconds", per_token),
        ("vllm:request_time_per_output_token_seconds", per_token),
        ("vllm:e2e_request_latency_seconds", request),
        ("vllm:request_decode_time_seconds", request),
        ("vllm:request_queue_time_seconds", request),
        ("vllm:request_prefill_time_seconds", request),
        ("vllm:request_inference_time_seconds", request),
        ("vllm:request_params_n", "1 2 5 10 20"),
        ("vllm:time_per_output_token_seconds", per_token),
        ("vllm:iteration_tokens_total", "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"),
    ):
        assert {float(edge) for edge in expected.split()} <= edges[name]


async def test_counters_agree_with_the_usage_that_clients_see():
    engine = FakeEngine(says("hello"))
    async with client_of(make_app(engine)) as client:
        prompt_tokens = completion_tokens = 0
        for body in ({"prompt": "ab"}, {"prompt": ["a", "bcd"], "n": 2}, {"prompt": "x", "max_tokens": 2}):
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            prompt_tokens += usage["prompt_tokens"]
            completion_tokens += usage["completion_tokens"]
        assert (await client.post("/v1/completions", json={"prompt": ""})).status_code == 400
        engine.dies_after = engine.num_updates + 2
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        series = await metrics_of(client)
    assert series["vllm:generation_tokens_total", *LABELS] == completion_tokens + 2
    assert series["vllm:prompt_tokens_total", *LABELS] == prompt_tokens + 1
    ended = {
        reason: series["vllm:request_success_total", LABELS[0], ("finished_reason", reason), LABELS[1]]
        for reason in ("stop", "length", "abort", "error")
    }
    assert ended == {"stop": 5, "length": 1, "abort": 0, "error": 1}
    assert series["vllm:e2e_request_latency_seconds_count", *LABELS] == sum(ended.values())
    assert series["vllm:time_to_first_token_seconds_count", *LABELS] == 7
    # "hello" and its end are six tokens, five gaps; "he" is one gap; the lost answer came to two tokens.
    assert series["vllm:inter_token_latency_seconds_count", *LABELS] == 5 * 5 + 1 + 1
    assert series["vllm:request_generation_tokens_sum", *LABELS] == completion_tokens + 2
    assert series["vllm:request_params_n_sum", *LABELS] == 1 + 2 + 2 + 1 + 1
    handler = ("handler", "/v1/completions"), ("method", "POST")
    assert series["http_requests_total", *handler, ("status", "2xx")] == 3
    assert series["http_requests_total", *handler, ("status", "4xx")] == 1
    assert series["http_requests_total", *handler, ("status", "5xx")] == 1
    assert series["octavo_http_errors_total", ("code", "400"), *LABELS] == 1
    assert series["octavo_http_errors_total", ("code", "503"), *LABELS] == 1


async def test_paths_that_do_not_exist_make_one_series():
    async with client_of(make_app(FakeEngine())) as client:
        for index in range(5):
            await client.request("BREW", f"/pot/{index}")
        series = await metrics_of(client)
    assert series["http_requests_total", ("handler", "unmatched"), ("method", "OTHER"), ("status", "4xx")] == 5
    assert not any("/pot" in str(key) for key in series)


async def test_openapi_describes_the_bodies():
    async with client_of(make_app(FakeEngine())) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert field in schema["required"]
        assert "temperature" in schema["properties"]
        assert "$ref" not in str(schema)
