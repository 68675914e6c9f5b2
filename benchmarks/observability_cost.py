"""What a line of the log and a traced request cost the event loop, by format and by what is sampled.

The line is that of an answered request; "plain" is the same text by logging's own formatter. A traced request is its
span and the three of the engine's work, handed to the SDK's batches, whose thread has an exporter that does nothing.
Runs anywhere, without a model; needs the extra `tracing`; writes benchmarks/results/observability_cost.json.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from scheduler.request_report import RequestReport
from server.log_lines import LogLine, RequestContext, current_request
from server.logging_setup import HumanFormatter, JsonFormatter
from server.request_history import RequestTrace
from server.tracing import Tracing

REQUEST_ID = "0123456789abcdef" * 2
CALLS = 500  # in a row, between two looks at the clock
# Bit 0 of the flags at its end is the caller's word on sampling.
TRACEPARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one line or one request, in microseconds."""

    what: str
    median_us: float
    least_us: float


class _NoExporter(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def _logger(name: str, formatter: logging.Formatter) -> logging.Logger:
    logger = logging.getLogger(f"cost.{name}")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler(Path("/dev/null").open("w"))  # noqa: SIM115  # open as long as the process lives
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return logger


def lines() -> dict[str, Callable[[], None]]:
    """The line of an answered request, by how it is written."""
    plain = _logger(
        "plain", logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S%z")
    )
    by_format = {"human": _logger("human", HumanFormatter()), "json": _logger("json", JsonFormatter("server"))}

    def write_plain() -> None:
        plain.info("%s %s %d %.1f ms id=%s key=%s", "POST", "/v1/completions", 200, 12.34, REQUEST_ID, "alice")

    def writer(logger: logging.Logger) -> Callable[[], None]:
        def write() -> None:
            told = f"{'POST'} {'/v1/completions'} {200} {12.34:.1f} ms"
            fields = {
                "request_id": REQUEST_ID,
                "id": "cmpl-0",
                "key": "alice",
                "client": "127.0.0.1",
                "method": "POST",
                "path": "/v1/completions",
                "route": "/v1/completions",
                "status": 200,
                "seconds": 0.01234,
            }
            logger.info(LogLine(told, fields, f"{told} id={REQUEST_ID} key=alice"))

        return write

    return {"plain line": write_plain, **{f"{name} line": writer(logger) for name, logger in by_format.items()}}


def traced(tracing: Tracing, *, is_sampled: bool) -> Callable[[], None]:
    """One request that the engine has answered."""
    headers = [(b"host", b"localhost"), (b"user-agent", b"client"), (b"content-type", b"application/json")]
    scope = {
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "headers": [*headers, (b"traceparent", TRACEPARENT + (b"1" if is_sampled else b"0"))],
    }
    waits = {"behind_others": 0.1}
    report = RequestReport("cmpl-0-0", "", 0, "finished", 1.0, 1.0, 5.0, 8, waits, None, 2.0, 3.0, 4.0)  # type: ignore[arg-type]

    def answer() -> None:
        span = tracing.begin(scope)
        trace = RequestTrace("cmpl-0", REQUEST_ID, None, "model", "/v1/completions", 1, span=span)
        trace.status, trace.ended = 200, 5.0
        trace.finish_reasons["stop"] += 1
        trace.reports = {"cmpl-0-0": report}
        span.answer("/v1/completions", 200)
        span.end(trace)

    return answer


def measure(works: dict[str, Callable[[], None]], rounds: int) -> list[Cost]:
    """All in turns, so that whatever else the machine does meets each of them."""
    seconds: dict[str, list[float]] = {what: [] for what in works}
    for _ in range(rounds):
        for what, work in works.items():
            began = time.perf_counter()
            for _ in range(CALLS):
                work()
            seconds[what].append((time.perf_counter() - began) / CALLS)
    return [Cost(what, round(1e6 * median(each), 2), round(1e6 * min(each), 2)) for what, each in seconds.items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="of each kind")
    parser.add_argument("--output", type=Path, default=RESULTS_DIR / "observability_cost.json")
    args = parser.parse_args(argv)
    # As the server sets it up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    # The exporter takes all that comes; what it cannot take in time would cost a warning each.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    current_request.set(RequestContext(REQUEST_ID))
    tracing = Tracing(BatchSpanProcessor(_NoExporter()))
    requests = {
        "request, sampled": traced(tracing, is_sampled=True),
        "request, not sampled": traced(tracing, is_sampled=False),
    }
    costs = measure({**lines(), **requests}, args.rounds)
    tracing.close(5.0)
    table = Table("", "median µs", "least µs")
    for cost in costs:
        table.add_row(cost.what, f"{cost.median_us:.1f}", f"{cost.least_us:.1f}")
    Console().print(table)
    result = {
        "question": "what a line of the log and a traced request cost the event loop",
        "command": command_line(),
        "machine": machine_facts(),
        "costs": [asdict(cost) for cost in costs],
    }
    write_result(args.output, result)


if __name__ == "__main__":
    main()
