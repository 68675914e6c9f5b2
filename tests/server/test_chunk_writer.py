"""Streams whose events are written as they come, over a socket: the same as streams that a task sends, in any order."""

import asyncio
import json
import random
import re
from contextlib import asynccontextmanager

import httpx
import pytest

from server.http_protocol import ChunkWriter
from tests.server.doubles import FakeEngine, client_of, make_app, says
from tests.server.test_http_protocol import serving

TEXT = "Ein Löwe 🦁 says: stop here, or do not stop. " * 3
BODIES = {
    "/v1/completions": [
        {"prompt": "abc"},
        {"prompt": ["abc", "de"], "n": 2, "echo": True, "stop": ["or do", "zzz"]},
        {"prompt": "abc", "logprobs": 2, "stream_options": {"include_usage": True}},
        {"prompt": "abc", "return_token_ids": True, "stream_options": {"continuous_usage_stats": True}},
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "a"}], "n": 2, "stream_options": {"include_usage": True}},
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1},
    ],
    "/v1/messages": [{"messages": [{"role": "user", "content": "a"}], "model": "byte-model"}],
    "/v1/responses": [{"input": "a"}],
}
CASES = [(path, body) for path, bodies in BODIES.items() for body in bodies]


def engine(**changes) -> FakeEngine:
    fake = FakeEngine(says(TEXT, ends=False), chunks=(1, 3, 1, 1, 2))
    for name, value in changes.items():
        setattr(fake, name, value)
    return fake


@asynccontextmanager
async def over_a_socket(app):
    async with serving(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield client


@pytest.fixture
def written(monkeypatch) -> list[bytes]:
    """What chunk writers write."""
    pieces = []
    write = ChunkWriter.write
    monkeypatch.setattr(ChunkWriter, "write", lambda self, data: (pieces.append(data), write(self, data))[1])
    return pieces


async def streamed(client, path, body) -> list[tuple[int, str]]:
    """The events of each choice in their order, without what differs between two answers to the same."""
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 150}
    response = await client.post(path, json={**body, **limit, "temperature": 0, "stream": True})
    assert response.status_code == 200, response.text
    text = re.sub(r'"(id|item_id|created|created_at|sequence_number|completed_at)":("[^"]*"|[\d.]+)', "", response.text)
    events = [event.partition("data: ")[2] for event in text.split("\n\n") if event]
    assert "".join(f"{e}\n\n" for e in text.split("\n\n") if e) == text
    return sorted(((int((re.search(r'"index":(\d+)', e) or [0, -1])[1]), e) for e in events), key=lambda pair: pair[0])


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_written_streams_are_those_that_are_sent(path, body, written):
    async with client_of(make_app(engine())) as client:
        expected = await streamed(client, path, body)
    assert not written
    async with over_a_socket(make_app(engine())) as client:
        assert await streamed(client, path, body) == expected
    assert len(written) > 10


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_overtakes_what_waits_for_a_slow_client(seed, monkeypatch, written):
    """Whenever the client takes no more, events go the other way."""
    path, body = CASES[1]
    async with over_a_socket(make_app(engine())) as client:
        expected = await streamed(client, path, body)
    num_written = len(written)
    draws = random.Random(seed)
    is_ready = ChunkWriter.is_ready
    monkeypatch.setattr(ChunkWriter, "is_ready", property(lambda self: draws.random() < 0.6 and is_ready.fget(self)))
    bursts = seed % 2 == 1  # updates come faster than the task that sends can run
    async with over_a_socket(make_app(engine(bursts=bursts))) as client:
        assert await streamed(client, path, body) == expected
    assert bursts or len(written) > num_written
    assert len(written) < 2 * num_written


async def test_a_client_that_does_not_read_is_not_written_to(written, monkeypatch):
    """The answer waits here, not in the transport, and comes whole when the client reads on."""
    cycles = []
    make = ChunkWriter.__init__
    monkeypatch.setattr(ChunkWriter, "__init__", lambda self, cycle: (cycles.append(cycle), make(self, cycle))[1])
    fake = FakeEngine(says("x" * 200, ends=False))
    async with serving(make_app(fake)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        begun = await reader.readuntil(b"\n\n\r\n")
        (cycle,) = cycles
        cycle.flow.pause_writing()
        num_written = len(written)
        while fake.open_requests:
            await asyncio.sleep(0.01)
        assert len(written) == num_written
        cycle.flow.resume_writing()
        text = (begun + await reader.read()).decode()
        writer.close()
    assert "".join(re.findall(r'"text":"(x*)"', text)) == "x" * 200
    assert text.endswith("data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_an_engine_that_dies_ends_the_stream_with_its_error(written):
    fake = engine(dies_after=40)
    async with over_a_socket(make_app(fake)) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 150, "stream": True})
    *events, last = [event for event in response.text.split("\n\n") if event]
    assert len(events) > 20
    assert all('"text"' in event for event in events)
    assert "engine_died" in last


async def test_a_failure_while_writing_ends_that_stream_alone(written, monkeypatch, caplog):
    from server.routes.completions import CompletionWriter

    delta = CompletionWriter.delta
    fake = engine()

    def fail_late(self, part, counts):
        if len(written) > 30 and self._head.id in fake.submitted[0].request_id:
            raise RuntimeError("not foreseen")
        return delta(self, part, counts)

    monkeypatch.setattr(CompletionWriter, "delta", fail_late)
    body = {"prompt": "a", "max_tokens": 150, "stream": True}
    async with over_a_socket(make_app(fake)) as client:
        first, second = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(2)))
    assert "internal_error" in first.text.split("\n\n")[-2]
    assert second.text.endswith("data: [DONE]\n\n")
    assert fake.open_requests == []
    assert [request_id for request_id, _ in fake.aborted] == [fake.submitted[0].request_id]


async def test_a_client_that_leaves_ends_its_request(written):
    fake = FakeEngine(says("x" * 250, ends=False), step_seconds=0.01)
    async with over_a_socket(make_app(fake)) as client:
        async with client.stream(
            "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 250}
        ) as r:
            async for _ in r.aiter_bytes():
                if len(written) > 3:
                    break
        async with asyncio.timeout(5):
            while fake.open_requests:
                await asyncio.sleep(0.01)
    assert len(fake.aborted) == 1
