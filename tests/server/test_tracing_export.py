"""Spans on their way out: a process that serves, a collector that reads OTLP over HTTP, and what goes wrong between."""

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from server.tracing import Tracing
from tests.server.test_serve import serving, stream

TRACE_ID, PARENT_ID = "a" * 32, "b" * 16


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.received: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for _, _, request in self.received
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append((self.path, dict(self.headers), ExportTraceServiceRequest.FromString(body)))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield collector
        collector.shutdown()


def values(attributes: list[KeyValue]) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def test_a_collector_gets_every_span_before_the_server_ends(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=one")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")  # only the end of the server sends them
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    with collecting() as collector, serving("--otlp-traces-endpoint", collector.url) as server:
        body = {"prompt": "abc", "max_tokens": 2}
        assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert len(list(stream(server, 3))) == 4
        assert not collector.received
        server.signal()
        assert server.end() == 0
        requests = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
        children = [span for span in collector.spans if span.kind == Span.SPAN_KIND_INTERNAL]
    (path, sent_headers, message) = collector.received[0]
    assert (path, sent_headers["x-tenant"]) == ("/v1/traces", "one")
    assert values(message.resource_spans[0].resource.attributes)["service.name"] == "llm"
    assert [span.name for span in requests] == ["POST /v1/completions"] * 2
    first, second = sorted(requests, key=lambda span: span.start_time_unix_nano)
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert second.trace_id != first.trace_id
    assert not second.parent_span_id
    for request in requests:
        phases = [span.name for span in children if span.parent_span_id == request.span_id]
        assert sorted(phases) == ["decode", "prefill", "queue"]
        assert values(request.attributes)["http.response.status_code"] == 200
    assert values(second.attributes)["gen_ai.request.stream"] is True
    assert not any("Spans" in line or "spans" in line for line in server.lines)


def test_without_the_extra_the_server_says_what_to_install():
    program = "import sys; sys.modules['opentelemetry.sdk'] = None; from server.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--otlp-traces-endpoint", "http://localhost:4318"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("octavo: --otlp-traces-endpoint needs OpenTelemetry, which cannot be imported (")
    assert done.stderr.endswith("): pip install 'octavo[tracing]'.\n")
    assert done.stderr.count("\n") == 1


def test_a_variable_that_makes_no_sense_is_one_sentence(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")  # less than a batch
    command = [sys.executable, "-m", "server.cli", "serve", "--otlp-traces-endpoint", "http://localhost:4318"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("octavo: OpenTelemetry cannot be set up: ")
    assert done.stderr.count("\n") == 1


def test_a_server_without_tracing_does_not_load_the_sdk():
    program = "import sys, server.app, server.serve; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


class Stuck(InMemorySpanExporter):
    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def export(self, spans):
        self.may_go_on.wait()
        return super().export(spans)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    exporter = Stuck()
    yield exporter
    exporter.may_go_on.set()


def test_a_collector_that_does_not_answer_does_not_keep_the_server(stuck, caplog):
    tracing = Tracing(BatchSpanProcessor(stuck))
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    began = time.monotonic()
    for _ in range(10_000):  # more than there is room for
        tracing.begin(scope).end()
    tracing.close(0.2)
    assert not stuck.may_go_on.is_set()
    assert time.monotonic() - began < 60, "it did not wait for the collector, which never answers"
    assert caplog.messages[-1] == "The last spans were not taken within 0 s and are lost."
