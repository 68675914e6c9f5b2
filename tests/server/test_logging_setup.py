"""Log lines of a process, read as a collector reads them: whatever is said in whatever way, each line is one object."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from datetime import datetime

import pytest

from server.log_lines import LINE_FIELDS, LogLine, RequestContext, current_request
from server.logging_setup import HumanFormatter, JsonFormatter

# Says everything that a process may say, each thing on its own.
_SPEAKER = """
import logging, sys, threading, warnings
from server.logging_setup import CONSOLE, configure_logging

configure_logging("info", sys.argv[1], "speaker")
log = logging.getLogger("octavo.test")
log.debug("not asked for")
log.info("plain %d", 1)
log.info("two\\nlines")
try:
    {}["missing"]
except KeyError:
    log.exception("caught")
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
logging.getLogger("uvicorn.error").info("not asked for")
logging.getLogger(CONSOLE).info("Loading %s ...", "weights")
warnings.warn("odd", UserWarning)
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()

class Failing:
    def __del__(self):
        raise ValueError("while deleted")

Failing()
raise RuntimeError("the end")
"""


def spoken(log_format: str) -> list[str]:
    command = [sys.executable, "-c", _SPEAKER, log_format]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": "."})
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()


def test_every_line_is_one_object_whatever_was_said():
    lines = [json.loads(line) for line in spoken("json")]
    assert [(line["level"], line["logger"], line["message"]) for line in lines] == [
        ("info", "octavo.test", "plain 1"),
        ("info", "octavo.test", "two\nlines"),
        ("error", "octavo.test", "caught"),
        ("warning", "uvicorn.error", "Invalid HTTP request received."),
        ("info", "octavo.console", "Loading weights ..."),
        ("warning", "py.warnings", "<string>:17: UserWarning: odd"),
        ("error", "octavo.process", "The thread worker ends by an error that nobody foresaw."),
        ("error", "octavo.process", lines[7]["message"]),
        ("critical", "octavo.process", "The process ends by an error that nobody foresaw."),
    ]
    assert all(line["process"] == "speaker" for line in lines)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    failures = [lines[index] for index in (2, 6, 7, 8)]
    assert [line["exception"] for line in failures] == [
        "KeyError: 'missing'",
        "ZeroDivisionError: division by zero",
        "ValueError: while deleted",
        "RuntimeError: the end",
    ]
    assert all(line["stack_trace"].startswith("Traceback (most recent call last):\n") for line in failures)
    assert not any("stack_trace" in line for line in lines if line not in failures)


def test_lines_for_people_keep_their_form():
    lines = spoken("human")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} INFO octavo\.test: plain 1", lines[0])
    assert "Loading weights ..." in lines, "for whoever starts the server: without a time"
    assert lines[-1] == "    RuntimeError: the end"
    assert not any("not asked for" in line for line in lines)


def test_a_line_for_people_cannot_be_forged():
    forged = "odd\n2026-01-31T12:00:00+0000 INFO octavo.access: GET / 200\r\x1b[2J\u2028\u00e9 \ud800\x85end"
    line = HumanFormatter().format(record("said", msg=forged))
    try:
        raise ValueError(forged)
    except ValueError:
        trace = HumanFormatter().format(record("said", exc_info=sys.exc_info()))
    for text in (line, trace):
        first, *others = text.split("\n")
        assert first.partition(" ")[2].startswith("INFO octavo.test: ")
        assert others
        assert all(other.startswith("    ") and other.isprintable() for other in others)
        assert "\u00e9" in text


def record(message: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("octavo.test", logging.INFO, "", 0, message, None, None)
    vars(made).update(fields)
    return made


@pytest.fixture
def request_context():
    token = current_request.set(RequestContext("r1", "a" * 32, "b" * 16))
    yield
    current_request.reset(token)


def test_lines_of_a_request_name_it(request_context):
    line = json.loads(JsonFormatter("server").format(record("said")))
    assert (line["request_id"], line["trace_id"], line["span_id"]) == ("r1", "a" * 32, "b" * 16)
    assert HumanFormatter().format(record("said")).endswith(" INFO octavo.test: said id=r1")


def test_fields_stand_beside_the_sentence():
    said = LogLine("It ended.", {"status": 200, "key": None, "reasons": {"stop": 2}}, "text for people")
    line = json.loads(JsonFormatter("server").format(record(said)))
    assert (line["message"], line["status"], line["key"], line["reasons"]) == ("It ended.", 200, None, {"stop": 2})
    assert HumanFormatter().format(record(said)).endswith(": text for people")
    assert str(LogLine("It ended.", {"status": 200})) == '{"status":200}'
    assert not LINE_FIELDS & said.fields.keys()


@pytest.mark.parametrize("value", ["\ud800", 1 << 80, float("nan"), object(), b"\xff", {1: 2}, "\u2028\n\x1b"])
def test_nothing_that_is_said_breaks_the_line(value):
    line = JsonFormatter("server").format(record(LogLine("odd", {"value": value})))
    assert "\n" not in line
    assert json.loads(line)["message"] == "odd"


@pytest.fixture
def far_from_utc(monkeypatch):
    monkeypatch.setenv("TZ", "XYZ-5:30")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_from_utc")
@pytest.mark.parametrize("created", [0.0, 1.9999, 1.7e9 + 0.0005, 1.7e9 + 0.99999])
def test_times_are_those_of_the_record(created):
    line = json.loads(JsonFormatter("server").format(record("said", created=created)))
    assert 0 <= created - datetime.fromisoformat(line["time"]).timestamp() < 0.001
    stamp = HumanFormatter().format(record("said", created=created)).split(" ")[0]
    assert stamp.endswith("+0530")
    assert datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%S%z").timestamp() == int(created)
