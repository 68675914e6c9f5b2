"""OpenTelemetry: a span for each HTTP request, with children for what the engine did, sent to a collector by OTLP.

The only file that knows the SDK, which the extra `tracing` installs: imported where it is asked for and nowhere else.
What goes by standard variables (sampling, batches, resource, propagation, collector's headers) the SDK reads itself.
"""

import logging
import threading
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from starlette.types import Scope

from kernels import __version__
from server.request_history import RequestTrace
from server.span_attributes import MAX_PROMPTS, Attributes, answer_attributes, http_attributes, phases_of

logger = logging.getLogger("octavo.tracing")

_TRACES_PATH = "/v1/traces"  # OTLP over HTTP, for an endpoint that is given without a path
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_QUEUE_LOGGER = "opentelemetry.sdk._shared_internal"
_HEADERS_LOGGER = "opentelemetry.util.re"
_CALLERS_LOGGERS = ("opentelemetry.baggage.propagation", "opentelemetry.trace.span")  # of headers that make no sense
_LEAST_ERROR, _LEAST_SERVER_ERROR = 400, 500  # of HTTP; the first are the callers'


class RequestSpan:
    """The span of one HTTP request, from before it is read until all is known of it."""

    def __init__(self, tracing: "Tracing", span: Span, method: str) -> None:
        """`span` has begun."""
        self._tracing = tracing
        self._span = span
        self._method = method
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}" if context.is_valid else None
        self.span_id = f"{context.span_id:016x}" if context.is_valid else None

    def describe(self, attributes: Attributes) -> None:
        """Add what has become known."""
        self._span.set_attributes(attributes)

    def answer(self, route: str | None, status: int) -> None:
        """The answer has been sent, or as much of it as there is. `route` is a template; None: there is none."""
        self._span.set_attribute("http.response.status_code", status)
        if route is not None:
            self._span.set_attribute("http.route", route)
            self._span.update_name(f"{self._method} {route}")
        if status >= _LEAST_SERVER_ERROR:
            self.fail(str(status))

    def fail(self, kind: str) -> None:
        """It is the server's fault that there is no answer, or no whole one."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR))

    def end(self, trace: RequestTrace | None = None) -> None:
        """Nothing more becomes known. `trace` is of a request that went to the engine."""
        if trace is None:
            self._span.end()
            return
        if self._span.is_recording():
            self.describe(answer_attributes(trace))
            if trace.finish_reasons["error"] and (trace.status or 0) < _LEAST_ERROR:  # after it had begun well
                self.fail("engine_error")
            self._add_phases(trace)
        self._span.end(end_time=None if trace.ended is None else _nanoseconds(trace.ended))

    def _add_phases(self, trace: RequestTrace) -> None:
        parent = set_span_in_context(self._span, Context())
        for position, engine_id in enumerate(trace.engine_ids()):
            if position >= MAX_PROMPTS:
                return
            report = trace.reports.get(engine_id)
            for phase in () if report is None else phases_of(report):
                attributes = {**phase.attributes, "octavo.prompt": position}
                began = _nanoseconds(phase.began)
                child = self._tracing.tracer.start_span(phase.name, parent, attributes=attributes, start_time=began)
                for event in phase.events:
                    child.add_event(event.name, event.attributes, _nanoseconds(event.time))
                child.end(_nanoseconds(phase.ended))


class Tracing:
    """Begins the spans of requests, and sees that they are sent. Nothing here waits for the collector but `close`."""

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor` gets all spans that are sampled. OTEL_TRACES_SAMPLER says which are."""
        own = {"service.name": "octavo", "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
        resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})  # a variable goes before ours
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("octavo", __version__)

    def begin(self, scope: Scope) -> RequestSpan:
        """A span for a request that has just come, in the caller's trace if it says that it has one."""
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            known = headers.get(name.decode("latin-1"))
            text = value.decode("latin-1")
            headers[name.decode("latin-1")] = text if known is None else f"{known},{text}"  # RFC 9110, section 5.3
        attributes = http_attributes(scope)
        method = str(attributes["http.request.method"]).replace("_OTHER", "HTTP")
        span = self.tracer.start_span(method, extract(headers, Context()), SpanKind.SERVER, attributes)
        return RequestSpan(self, span, method)

    def close(self, seconds: float) -> None:
        """Send what is left, for at most so long. To be called in a thread."""
        flushing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        flushing.start()
        flushing.join(seconds)
        if flushing.is_alive():
            logger.warning("The last spans were not taken within %.0f s and are lost.", seconds)


class WatchedExporter(SpanExporter):
    """Says once that spans cannot be sent, and once that they can again: the SDK says it of each try."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        """Silence the SDK's own words; `endpoint` stands in ours, without what may be a password or a token."""
        self._exporter = exporter
        parts = urlsplit(endpoint)
        self._endpoint = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
        self._secrets = [text for text in (parts.netloc.rpartition("@")[0], parts.query) if text]
        self._reasons: list[str] = []  # of the SDK, for the spans that are being sent
        self._num_lost = 0  # since the last that were taken
        self._queue_was_full = False
        logging.getLogger(_EXPORTER_LOGGER).addFilter(self._keep)
        logging.getLogger(_QUEUE_LOGGER).addFilter(self._pass_once)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them, in the thread of the batches."""
        self._reasons.clear()
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._num_lost:
                reason = self._reasons[0] if self._reasons else "the exporter gave no reason"
                for secret in self._secrets:
                    reason = reason.replace(secret, "***")
                logger.warning("Spans cannot be sent to %s and are lost until they can: %s", self._endpoint, reason)
            self._num_lost += len(spans)
        elif self._num_lost:
            logger.warning("Spans reach %s again; %d could not be sent.", self._endpoint, self._num_lost)
            self._num_lost, self._queue_was_full = 0, False
        return result

    def shutdown(self) -> None:
        """Send nothing more."""
        self._exporter.shutdown()
        logging.getLogger(_EXPORTER_LOGGER).removeFilter(self._keep)
        logging.getLogger(_QUEUE_LOGGER).removeFilter(self._pass_once)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing waits here."""
        return self._exporter.force_flush(timeout_millis)

    def _keep(self, record: logging.LogRecord) -> bool:
        self._reasons.append(record.getMessage())
        return False

    def _pass_once(self, record: logging.LogRecord) -> bool:
        """Of spans for which there is no room while others cannot be sent."""
        if record.levelno != logging.WARNING:
            return True
        is_first, self._queue_was_full = not self._queue_was_full, True
        return is_first


def start_tracing(endpoint: str) -> Tracing:
    """Trace requests, and send the spans in batches to a collector at this http or https URL."""
    logging.getLogger(_HEADERS_LOGGER).addFilter(_hide_header)
    for name in _CALLERS_LOGGERS:  # anybody could fill the log with them
        logging.getLogger(name).setLevel(logging.ERROR)
    url = traces_url(endpoint)
    return Tracing(BatchSpanProcessor(WatchedExporter(OTLPSpanExporter(endpoint=url), url)))


def traces_url(endpoint: str) -> str:
    """Where a collector takes spans: the URL, with OTLP's path if it has none."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else urlunsplit(parts._replace(path=_TRACES_PATH))


def _hide_header(record: logging.LogRecord) -> bool:
    """The SDK would say what it cannot read, which may be a key."""
    record.args = ()
    record.msg = (
        "OTEL_EXPORTER_OTLP_HEADERS or OTEL_EXPORTER_OTLP_TRACES_HEADERS has an entry that is not name=value, both "
        "percent-encoded; it is left out."
    )
    return True


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
