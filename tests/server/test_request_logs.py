"""What the log says of requests where it is read by collectors: which lines there are, whose they are, their fields."""

import asyncio
import io
import json
import logging
import subprocess
import sys

import pytest

from server.log_lines import current_request
from server.logging_setup import JsonFormatter
from server.preparer_process import answer
from server.value_codec import ValueCodec
from tests.server.doubles import FakeEngine, client_of, make_app
from tests.server.test_serve import serving

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def log():
    """The lines that have been written, as a collector gets them."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("server"))
    octavo = logging.getLogger("octavo")
    level = octavo.level
    octavo.addHandler(handler)
    octavo.setLevel("INFO")
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    octavo.removeHandler(handler)
    octavo.setLevel(level)


async def test_an_answer_leaves_two_lines_with_its_ids_and_its_trace(log):
    headers = {"x-request-id": "r1", "traceparent": TRACEPARENT, "authorization": "Bearer a"}
    async with client_of(make_app(FakeEngine(), api_key=("alice:a",))) as client:
        answered = await client.post("/v1/completions", json={"prompt": "ab"}, headers=headers)
    access, ended = sorted(log(), key=lambda line: line["logger"])
    both = {"request_id": "r1", "id": answered.json()["id"], "key": "alice", "status": 200}
    assert both.items() <= access.items()
    assert both.items() <= ended.items()
    assert (access["logger"], ended["logger"]) == ("octavo.access", "octavo.ended")
    assert access["message"].startswith("POST /v1/completions 200 ")
    assert (access["method"], access["path"], access["route"]) == ("POST", "/v1/completions", "/v1/completions")
    assert access["seconds"] >= 0
    assert ended["completion_tokens"] == 0, "what the stand-in reports"
    for line in (access, ended):
        assert (line["trace_id"], line["span_id"]) == ("a" * 32, "b" * 16)
    assert current_request.get() is None


async def test_no_part_of_a_request_passes_for_a_field_of_its_line(caplog):
    caplog.set_level("INFO")
    odd = "/a%20200%201.0%20ms%20id=fake%20key=admin%0A%1B%C3%A9%25"
    async with client_of(make_app(FakeEngine())) as client:
        await client.get(odd, headers={"x-request-id": "two words"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "octavo.access"]
    method, path, status, _, unit, request_id = line.split(" ")
    assert (method, path, status, unit) == ("GET", odd, "404", "ms")
    assert request_id.startswith("id=")
    assert "fake" not in request_id


@pytest.mark.parametrize(
    "traceparent", ["", "00-1-2-01", f"00-{'0' * 32}-{'b' * 16}-01", f"ff-{'a' * 32}-{'b' * 16}-01"]
)
async def test_what_is_no_trace_is_no_field(log, traceparent):
    async with client_of(make_app(FakeEngine())) as client:
        await client.get("/v1/models", headers={"traceparent": traceparent})
    (line,) = log()
    assert not {"trace_id", "span_id"} & line.keys()


async def test_a_failure_is_one_line_that_names_its_request(log):
    engine = FakeEngine()
    engine.submit = None  # type: ignore[method-assign, assignment]
    async with client_of(make_app(engine)) as client:
        await client.post("/v1/completions", json={"prompt": "ab"}, headers={"x-request-id": "r1"})
    failure = next(line for line in log() if line["level"] == "error")
    assert (failure["request_id"], failure["exception"]) == ("r1", "TypeError: 'NoneType' object is not callable")
    assert failure["stack_trace"].startswith("Traceback ")
    assert {line["request_id"] for line in log()} == {"r1"}


async def test_what_uvicorn_says_of_a_broken_answer_names_its_request(log):
    async def breaks(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("odd")

    async def run_as_uvicorn_does():
        app = make_app(FakeEngine())
        app.add_middleware(lambda _app: breaks)
        inside = app.user_middleware.pop(0)
        app.user_middleware.append(inside)  # below all of ours
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-request-id", b"r1")]}

        async def send(_message):
            pass

        try:
            await app(scope, None, send)
        except ValueError:
            logging.getLogger("octavo.test").exception("Exception in ASGI application")

    await asyncio.create_task(run_as_uvicorn_does())
    failure = next(line for line in log() if line["logger"] == "octavo.test")
    assert (failure["request_id"], failure["exception"]) == ("r1", "ValueError: odd")
    assert current_request.get() is None


async def test_a_body_is_a_field_as_it_came(log):
    async with client_of(make_app(FakeEngine(), enable_log_requests=True, max_log_len=12)) as client:
        await client.post("/v1/completions", content=b'{"prompt":\n"\xc3\xa9"}')
    line = next(line for line in log() if line["logger"] == "octavo.requests")
    assert (line["body"], line["num_bytes"], line["is_cut"]) == ('{"prompt":\n"', 16, True)


def fail(_body: bytes, _model: object) -> None:
    raise ValueError("odd")


def test_the_preparing_process_knows_whose_line_it_is(log):
    codec = ValueCodec({})
    for context in (("r1", None, None), None):
        answer(codec.encode((__name__, "fail", None, context)), b"", codec)
    named, unnamed = log()
    assert named["request_id"] == "r1"
    assert "request_id" not in unnamed


def test_a_server_writes_nothing_but_objects():
    with serving("--log-format", "json") as server:
        body = {"prompt": "a", "max_tokens": 2}
        assert server.client.post("/v1/completions", json=body, headers={"x-request-id": "r1"}).status_code == 200
        assert server.client.get("/health/ready").status_code == 200
        server.signal()
        assert server.end() == 0
    lines = [json.loads(line) for line in server.lines]
    (ready,) = (line for line in lines if "url" in line)
    assert (ready["served_models"], ready["num_kv_blocks"], ready["needs_key"]) == (["smollm2"], 64, False)
    assert [line["message"] for line in lines if line["logger"] == "octavo.console"] == [
        "Loading weights ...",
        ready["message"],
    ]
    assert sum(line["logger"] == "octavo.access" for line in lines) == 1, "probes are not said at this level"


def test_the_reason_of_a_failed_start_is_an_object_too():
    flags = ("--port", "0", "--log-format", "json", "--api-key-file", "/nowhere")
    command = [sys.executable, "-m", "tests.server.serve_with_fake_engine", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    line = json.loads(done.stderr)
    assert (done.returncode, line["level"], line["logger"]) == (2, "error", "octavo.console")
    assert line["message"] == "The file of keys /nowhere cannot be read: No such file or directory."
