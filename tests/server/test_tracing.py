"""Spans of requests, as the SDK's own exporter keeps them: whose they are, how they nest, what they say and lack."""

import asyncio
import logging

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from scheduler.request_report import Preemption, RequestReport
from server.app import create_app
from server.config import Settings, load_settings
from server.engine_errors import RequestDropped
from server.log_lines import current_request
from server.request_history import RequestTrace
from server.settings_error import SettingsError
from server.span_attributes import phases_of
from server.tracing import Tracing, WatchedExporter, start_tracing, traces_url
from tests.server.doubles import FakeEngine, byte_tokenizer, client_of

TRACE_ID, PARENT_ID = "a" * 32, "b" * 16
CALLER = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}


class Traced:
    """The application over a stand-in for the engine, and the spans that it has made."""

    def __init__(self, engine: FakeEngine | None = None, **settings: object) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self.exporter))
        self.engine = engine or FakeEngine()
        app = create_app(
            self.engine,  # type: ignore[arg-type]
            byte_tokenizer(),
            Settings(model="byte-model", **settings),  # type: ignore[arg-type]
            tracing=self.tracing,
        )
        self.client = client_of(app)

    @property
    def spans(self) -> dict[str, list]:
        named: dict[str, list] = {}
        for span in sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time):
            named.setdefault(span.name, []).append(span)
        return named

    async def post(self, path: str = "/v1/completions", headers: dict | None = None, **body: object):
        return await self.client.post(path, json={"prompt": "abcd", **body}, headers=headers or {})


async def test_an_answer_is_one_span_of_the_callers_trace_with_its_phases_inside():
    traced = Traced()
    answered = await traced.post(headers={**CALLER, "x-request-id": "r1", "user-agent": "me"}, max_tokens=2)
    (request,) = traced.spans["POST /v1/completions"]
    assert request.kind is SpanKind.SERVER
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    assert request.context.trace_state.get("vendor") == "1"
    assert request.status.status_code is StatusCode.UNSET
    phases = [traced.spans[name][0] for name in ("queue", "prefill", "decode")]
    assert len(traced.exporter.get_finished_spans()) == 4
    for phase in phases:
        assert phase.parent == request.context
        assert phase.kind is SpanKind.INTERNAL
        assert phase.context.trace_id == request.context.trace_id
    assert [after.start_time for after in phases[1:]] == [before.end_time for before in phases[:-1]]
    assert [(phase.end_time - phase.start_time) / 1e9 for phase in phases] == pytest.approx([1, 0.5, 1.5], abs=1e-5)
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "user_agent.original": "me",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "byte-model",
        "gen_ai.response.model": "byte-model",
        "gen_ai.response.id": answered.json()["id"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.request.id": "r1",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.prompt_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.latency.time_in_queue": pytest.approx(1),
        "gen_ai.latency.time_to_first_token": pytest.approx(1.5),
        "gen_ai.latency.e2e": pytest.approx(3),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(0.5),
        "gen_ai.latency.time_in_model_decode": pytest.approx(1.5),
        "gen_ai.latency.time_in_model_inference": pytest.approx(2),
    }
    assert {name: request.attributes.get(name) for name in expected} == expected
    assert phases[0].attributes["octavo.wait_seconds.behind_others"] == 1.0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": "a secret"}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a secret"}]}, "chat"),
        ("/v1/responses", {"input": "a secret"}, "chat"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 9}, "chat"),
        ("/v1/embeddings", {"input": "a secret"}, "embeddings"),
    ],
)
async def test_every_api_is_traced_and_tells_no_text_and_no_key(path, body, operation, streamed):
    traced = Traced(api_key=("alice:sesame",))
    body = {"model": "byte-model", "stream": streamed, **body} if operation != "embeddings" else body
    headers = {"authorization": "Bearer sesame", "x-api-key": "sesame"}
    answered = await traced.client.post(path, json=body, headers=headers)
    assert answered.status_code == 200
    (request,) = traced.spans[f"POST {path}"]
    assert request.attributes["gen_ai.operation.name"] == operation
    assert request.attributes["octavo.key"] == "alice"
    if operation != "embeddings":
        assert request.attributes["gen_ai.request.stream"] is streamed
    told = " ".join(span.to_json() for span in traced.exporter.get_finished_spans())
    assert not any(text in told for text in ("secret", "terces", "sesame"))


async def test_each_prompt_has_its_phases():
    traced = Traced()
    await traced.post(prompt=["ab", "cd", "efg"], n=2, max_tokens=1)
    (request,) = traced.spans["POST /v1/completions"]
    for name in ("queue", "prefill", "decode"):
        assert sorted(span.attributes["octavo.prompt"] for span in traced.spans[name]) == [0, 1, 2]
    assert request.attributes["gen_ai.usage.input_tokens"] == 7
    assert request.attributes["gen_ai.usage.num_sequences"] == 6
    assert request.attributes["gen_ai.request.choice.count"] == 2


async def test_thousands_of_prompts_do_not_make_thousands_of_spans():
    traced = Traced()
    await traced.post(prompt=["a"] * 100, max_tokens=1)
    assert len(traced.spans["queue"]) == 64
    assert traced.spans["POST /v1/completions"][0].attributes["octavo.num_prompts"] == 100


async def test_what_operators_machines_ask_makes_no_spans():
    traced = Traced()
    for path in ("/health/live", "/health/ready", "/metrics", "/dashboard", "/v1/requests/none"):
        await traced.client.get(path)
    assert not traced.spans
    await traced.client.get("/v1/models")
    assert list(traced.spans) == ["GET /v1/models"]


def failing(kind: str) -> FakeEngine:
    engine = FakeEngine()
    match kind:
        case "dropped":
            engine.drops = RequestDropped("full", "queue_full", 1.0)
        case "down":
            engine.is_down = True
        case "broken":
            engine.submit = None  # type: ignore[method-assign, assignment]
    return engine


@pytest.mark.parametrize(
    ("kind", "max_tokens", "status"), [("bad", -1, 400), ("dropped", 1, 429), ("down", 1, 503), ("broken", 1, 500)]
)
async def test_failures_of_ours_are_errors_and_others_are_not(kind, max_tokens, status, monkeypatch):
    monkeypatch.setattr("server.request_history._GRACE_SECONDS", 0.0)
    traced = Traced(failing(kind))
    assert (await traced.post(max_tokens=max_tokens)).status_code == status
    while not traced.spans:
        await asyncio.sleep(0)
    (request,) = traced.spans["POST /v1/completions"]
    assert request.attributes["http.response.status_code"] == status
    assert request.status.status_code is (StatusCode.ERROR if status >= 500 else StatusCode.UNSET)
    assert request.attributes.get("error.type") == (str(status) if status >= 500 else None)


async def test_a_stream_that_breaks_is_an_error_though_it_began_well():
    engine = FakeEngine()
    engine.dies_after = 2
    traced = Traced(engine)
    answered = await traced.post(stream=True)
    assert answered.status_code == 200
    (request,) = traced.spans["POST /v1/completions"]
    assert request.status.status_code is StatusCode.ERROR
    assert request.attributes["error.type"] == "engine_error"


async def test_unmatched_paths_make_no_endless_names():
    traced = Traced()
    for path in ("/nothing", "/else"):
        await traced.client.get(path)
    assert list(traced.spans) == ["GET"]
    assert all("http.route" not in span.attributes for span in traced.spans["GET"])


async def test_a_span_ends_with_its_answer_and_not_with_the_engines_last_word():
    traced, answered = Traced(), RequestTrace("cmpl-1", "r1", None, "m", "/v1/completions", 1, ended=2e9)
    traced.tracing.begin({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}).end(answered)
    (span,) = traced.exporter.get_finished_spans()
    assert span.end_time == 2_000_000_000 * 10**9


@pytest.mark.parametrize(
    ("headers", "is_child", "vendors"),
    [
        ([("traceparent", CALLER["traceparent"]), ("tracestate", "a=1"), ("tracestate", "b=2")], True, {"a", "b"}),
        ([("traceparent", CALLER["traceparent"]), ("traceparent", CALLER["traceparent"])], False, set()),
    ],
)
async def test_headers_that_come_twice_are_one(headers, is_child, vendors):
    traced = Traced()
    async with traced.client as client:
        await client.get("/v1/models", headers=headers)
    (span,) = traced.exporter.get_finished_spans()
    assert (span.parent is not None) == is_child
    assert set(span.context.trace_state) == vendors


async def test_lines_of_the_log_name_the_servers_own_span(caplog):
    caplog.set_level(logging.INFO, "octavo")
    traced = Traced()
    seen = []
    submit = traced.engine.submit

    def spying(message):
        seen.append(current_request.get())
        return submit(message)

    traced.engine.submit = spying  # type: ignore[method-assign]
    await traced.post(headers=CALLER)
    (request,) = traced.spans["POST /v1/completions"]
    assert (seen[0].trace_id, seen[0].span_id) == (TRACE_ID, f"{request.context.span_id:016x}")
    ended = next(record.msg.fields for record in caplog.records if record.name == "octavo.ended")
    assert (ended["trace_id"], ended["span_id"]) == (TRACE_ID, f"{request.context.span_id:016x}")


@pytest.mark.parametrize(("sampler", "num_spans"), [("always_off", 0), ("always_on", 4), ("parentbased_always_off", 0)])
async def test_the_standard_variable_says_what_is_sampled(monkeypatch, sampler, num_spans):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    traced = Traced()
    await traced.post()
    assert len(traced.exporter.get_finished_spans()) == num_spans


async def test_a_caller_who_samples_nothing_gets_no_spans():
    traced = Traced()
    await traced.post(headers={"traceparent": CALLER["traceparent"][:-1] + "0"})
    assert not traced.spans


async def test_standard_variables_name_the_service(monkeypatch):
    await (traced := Traced()).post()
    assert traced.spans["queue"][0].resource.attributes["service.name"] == "octavo"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    await (traced := Traced()).post()
    resource = traced.spans["queue"][0].resource.attributes
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("mine", "test")


def report(**fields: object) -> RequestReport:
    defaults = {
        "tenant": "",
        "priority": 0,
        "state": "finished",
        "arrival_time": 9.0,
        "queued_time": 10.0,
        "report_time": 20.0,
        "num_prompt_tokens": 8,
        "wait_seconds": {},
    }
    return RequestReport(request_id="cmpl-1-0", **{**defaults, **fields})  # type: ignore[arg-type]


def preemption(time: float) -> Preemption:
    return Preemption(time, 0, "cmpl-2-0", "", "kv_blocks", 5, False)


@pytest.mark.parametrize(
    ("fields", "phases"),
    [
        ({}, [("queue", 10, 20)]),
        ({"ended_time": 12.0}, [("queue", 10, 12)]),
        ({"admitted_time": 11.0, "ended_time": 12.0}, [("queue", 10, 11), ("prefill", 11, 12)]),
        (
            {"admitted_time": 11.0, "first_token_time": 12.0, "ended_time": 15.0},
            [("queue", 10, 11), ("prefill", 11, 12), ("decode", 12, 15)],
        ),
        ({"admitted_time": 11.0, "ended_time": 10.5}, [("queue", 10, 11), ("prefill", 11, 11)]),
    ],
)
def test_phases_follow_one_another_up_to_the_last_that_was_reached(fields, phases):
    assert [(phase.name, phase.began, phase.ended) for phase in phases_of(report(**fields))] == phases


def test_preemptions_stand_in_the_phase_in_which_they_came():
    times = (11.5, 12.0, 14.0, 15.0)
    ended = report(
        admitted_time=11.0,
        first_token_time=12.0,
        ended_time=15.0,
        preemptions=tuple(map(preemption, times)),
        num_preemptions=4,
    )
    events = {phase.name: [event.time for event in phase.events] for phase in phases_of(ended)}
    assert events == {"queue": [], "prefill": [11.5], "decode": [12.0, 14.0, 15.0]}


class Collector(InMemorySpanExporter):
    is_down = False

    def export(self, spans):
        if self.is_down:
            logger = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            logger.warning("Transient error %s.", "refused")
            logger.error("Failed to export.")
            return SpanExportResult.FAILURE
        return super().export(spans)


async def test_a_collector_that_is_down_is_said_once_and_harms_no_request(caplog):
    collector = Collector()
    watched = WatchedExporter(collector, "http://me:secret@collector:4318/v1/traces")
    tracing = Tracing(SimpleSpanProcessor(watched))
    app = create_app(FakeEngine(), byte_tokenizer(), Settings(model="byte-model"), tracing=tracing)  # type: ignore[arg-type]
    async with client_of(app) as client:
        for is_down in (True, True, False, True):
            collector.is_down = is_down
            assert (await client.get("/v1/models")).status_code == 200
    tracing.close(1.0)
    said = [record.getMessage() for record in caplog.records if record.name != "asyncio"]
    assert said == [
        "Spans cannot be sent to http://collector:4318/v1/traces and are lost until they can: Transient error refused.",
        "Spans reach http://collector:4318/v1/traces again; 2 could not be sent.",
        "Spans cannot be sent to http://collector:4318/v1/traces and are lost until they can: Transient error refused.",
    ]


@pytest.mark.parametrize("port", [1, 99999])  # where nobody listens, and none at all
def test_no_secret_of_the_collectors_address_is_said(caplog, port):
    url = f"http://me:hush@127.0.0.1:{port}/v1/traces?token=hist"
    WatchedExporter(OTLPSpanExporter(endpoint=url, timeout=0.5), url).export([])
    assert f"http://127.0.0.1:{port}/v1/traces" in caplog.text
    assert not any(secret in caplog.text for secret in ("hush", "hist"))


def test_no_secret_of_a_variable_that_is_mistaken_is_said(caplog, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key: hush")
    start_tracing("http://127.0.0.1:1").close(5.0)
    assert [record.name for record in caplog.records] == ["opentelemetry.util.re"]
    assert "OTEL_EXPORTER_OTLP_HEADERS" in caplog.text
    assert "hush" not in caplog.text
    with pytest.raises(SettingsError) as refused:
        load_settings({"otlp_traces_endpoint": "grpc://me:hush@collector"})
    assert "hush" not in str(refused.value)


def test_mistakes_in_callers_headers_are_not_the_operators(caplog):
    tracing = start_tracing("http://127.0.0.1:1")
    headers = [
        (b"traceparent", CALLER["traceparent"].encode()),
        (b"tracestate", b"!!"),
        (b"baggage", b"no\xe9 baggage"),
    ]
    tracing.begin({"type": "http", "method": "GET", "path": "/v1/models", "headers": headers})
    tracing.close(5.0)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://a.example/otlp/v1/traces", "https://a.example/otlp/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_gets_that_of_otlp(endpoint, url):
    assert traces_url(load_settings({"otlp_traces_endpoint": endpoint}).otlp_traces_endpoint) == url


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "localhost:4318", "http://", "http:///v1/traces"])
def test_what_is_no_http_url_is_refused(endpoint):
    with pytest.raises(SettingsError, match=r"--otlp-traces-endpoint must be an http or https URL.*not gRPC"):
        load_settings({"otlp_traces_endpoint": endpoint})
