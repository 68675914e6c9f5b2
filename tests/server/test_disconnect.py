"""A client that goes away, at every moment of its request: nothing of it stays in the engine."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest

from server import preparation
from server.disconnect import ClientDisconnected, until_disconnect
from server.routes import completions
from tests.server.doubles import FakeEngine, make_app, says


class Client:
    """Speaks ASGI to an application, and can go away."""

    def __init__(self, app, path: str, body: dict, key: str | None = None) -> None:
        self.sent: list[dict] = []
        self.gone = asyncio.Event()
        self._body = json.dumps(body).encode()
        self._body_sent = False
        self._progress = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [] if key is None else [(b"authorization", f"Bearer {key}".encode())],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self.served = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        self.sent.append(message)
        self._progress.set()

    def text(self) -> str:
        """What came of the answer's body."""
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def wait_for_messages(self, count: int) -> None:
        while len(self.sent) < count:
            self._progress.clear()
            await self._progress.wait()


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"]])
@pytest.mark.parametrize("num_messages", [1, 2, 5])
async def test_stream(n, prompt, num_messages):
    engine = FakeEngine(says("x" * 200))
    client = Client(make_app(engine), "/v1/completions", {"prompt": prompt, "n": n, "stream": True, "max_tokens": 200})
    await client.wait_for_messages(num_messages)
    assert engine.open_requests
    client.gone.set()
    await client.served
    assert engine.open_requests == []
    assert {request_id for request_id, _ in engine.aborted} == {message.request_id for message in engine.submitted}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("num_updates", [0, 1, 7])
async def test_whole_answer(path, num_updates):
    engine = FakeEngine(says("x" * 200))
    body = {"prompt": "abc", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 200}
    client = Client(make_app(engine), path, body)
    await until(lambda: engine.submitted and engine.num_updates >= num_updates)
    client.gone.set()
    await client.served
    assert engine.open_requests == []
    assert engine.aborted == [(engine.submitted[0].request_id, None)]


@pytest.mark.parametrize("streamed", [False, True])
async def test_before_the_first_token(streamed):
    """Queued or in prefill: the engine has said nothing yet."""
    engine = FakeEngine(step_seconds=3600)
    client = Client(make_app(engine), "/v1/completions", {"prompt": "abc", "stream": streamed})
    await until(lambda: engine.submitted)
    client.gone.set()
    await client.served
    assert engine.open_requests == []


async def test_while_it_is_tokenised(monkeypatch):
    began, proceed = threading.Event(), threading.Event()

    def slow(body, model):
        began.set()
        proceed.wait(60)
        return preparation.prepare_completion(body, model)

    monkeypatch.setattr(completions, "ROUTE", replace(completions.ROUTE, prepare=slow))
    engine = FakeEngine()
    client = Client(make_app(engine), "/v1/completions", {"prompt": "abc"})
    await until(began.is_set)
    client.gone.set()
    await client.served
    proceed.set()
    assert engine.submitted == []


async def test_aborted_sequences_are_counted_once():
    engine = FakeEngine(says("x" * 200))
    app = make_app(engine)
    client = Client(app, "/v1/completions", {"prompt": "abc", "n": 2, "stream": True, "max_tokens": 200})
    await client.wait_for_messages(4)
    client.gone.set()
    await client.served
    text = (await app.state.edge.metrics.exposition()).decode()
    assert 'finished_reason="abort",model_name="byte-model"} 2.0' in text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in text


async def test_server_that_cancels_a_request_leaves_nothing_behind():
    engine = FakeEngine(says("x" * 200))
    client = Client(make_app(engine), "/v1/completions", {"prompt": "abc", "stream": True, "max_tokens": 200})
    await client.wait_for_messages(3)
    client.served.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.served
    assert engine.open_requests == []


async def test_work_has_ended_when_the_disconnect_is_reported():
    ended = asyncio.Event()
    began = asyncio.Event()

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def receive() -> dict:
        await began.wait()
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnected):
        await until_disconnect(receive, work())
    assert ended.is_set()


async def test_result_and_error_of_work_pass_through():
    async def receive() -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    async def fail() -> None:
        raise KeyError("x")

    async def succeed() -> int:
        return 5

    assert await until_disconnect(receive, succeed()) == 5
    with pytest.raises(KeyError):
        await until_disconnect(receive, fail())
