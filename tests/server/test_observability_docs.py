"""docs/observability.md names each field of a line and each attribute of a span, and none that there is not."""

import logging
import re
from pathlib import Path

import pytest

from scheduler.request_report import Preemption
from server.log_lines import LINE_FIELDS, LogLine
from server.span_attributes import http_attributes
from tests.server.doubles import FakeEngine, report_of
from tests.server.test_tracing import Traced

TEXT = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
NAMES = frozenset(re.findall(r"`([a-z_]+(?:\.[a-z0-9_]+)+)`", TEXT))
LOGGERS = {"octavo.access", "octavo.ended", "octavo.engine", "octavo.requests", "uvicorn.error"}


def story(message, has_ended):
    report = report_of(message, has_ended)
    preemption = Preemption(report.queued_time + 2, 0, message.request_id, "", "kv_blocks", 3, False)
    return type(report)(**{name: getattr(report, name) for name in report.__slots__} | {"preemptions": (preemption,)})


async def emitted() -> set[str]:
    engine = FakeEngine()
    engine.report_of = story
    traced = Traced(engine, api_key=("alice:a",))
    for body in (
        {"n": 2, "top_k": 3, "presence_penalty": 1, "frequency_penalty": 1, "max_tokens": 2},
        {"use_beam_search": True, "beam_width": 2, "max_tokens": 2},
        {"structured_outputs": {"json_object": True}, "max_tokens": 2},
    ):
        answered = await traced.post(headers={"authorization": "Bearer a", "user-agent": "me"}, **body)
        assert answered.status_code == 200, answered.text
    spans = traced.exporter.get_finished_spans()
    parts = [*spans, *(event for span in spans for event in span.events)]
    odd = {"method": "BREW", "path": "/", "headers": [], "client": ("::1", 1), "server": ("::1", 2)}
    return {name for part in parts for name in part.attributes} | http_attributes(odd).keys()


async def test_the_attributes_of_spans_are_those_of_the_tables():
    names = {re.sub(r"(wait_seconds)\.(?!preempted).*", r"\1.*", name) for name in await emitted()}
    rare = {"error.type", "octavo.drop_causes"}  # of failures
    written = {name for name in NAMES - LOGGERS if not name.endswith((".md", ".json"))} | {"octavo.wait_seconds.*"}
    assert names | rare == written
    assert "`octavo.wait_seconds.*`" in TEXT


@pytest.mark.parametrize("logger", ["octavo.access", "octavo.requests"])
async def test_the_fields_of_lines_are_named(caplog, logger):
    caplog.set_level(logging.INFO, "octavo")
    await Traced(enable_log_requests=True).post()
    line = next(record.msg for record in caplog.records if record.name == logger)
    assert isinstance(line, LogLine)
    assert not [name for name in {*line.fields, *LINE_FIELDS} if f"`{name}`" not in TEXT]
