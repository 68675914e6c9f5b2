"""A server for the tests of the load test: answers in OpenAI's form at a pace that is set, stalls and fails on demand.

Runs in the event loop of the test, so that a test can read and change it while a load runs.
"""

import asyncio
import contextlib
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StandIn:
    """What it does with the next requests, and what it was asked."""

    refusal_of_models: str = ""  # status and body
    first_delay: float = 0.0  # seconds to the first token
    delay: float = 0.0  # between tokens
    has_usage: bool = True
    keeps_alive: bool = True
    fails: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None  # how a request fails
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each came
    num_connections: int = 0
    num_open: int = 0
    most_open: int = 0
    stalls: tuple[float, float] = (0.0, 0.0)  # from when until when it answers nothing, by time.perf_counter()
    url: str = ""
    tasks: "list[asyncio.Future[None]]" = field(default_factory=list)

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        begin, end = self.stalls
        while begin <= (now := time.perf_counter()) < end:
            await asyncio.sleep(end - now)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                body = json.loads(await reader.readexactly(int(length[1]) if length else 0) or b"{}")
                if head.startswith("GET") and self.refusal_of_models:
                    status, text = self.refusal_of_models.split(" ", 1)
                    writer.write(_whole(int(status), text, headers="Location: https://elsewhere/v1/models\r\n"))
                    continue
                if head.startswith("GET"):
                    models = {"data": [{"id": "a-model", "max_model_len": 2048}]}
                    writer.write(_whole(200, json.dumps(models)))
                    continue
                self.times.append(time.perf_counter())
                self.heads.append(head)
                self.bodies.append(body)
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                try:
                    if not await self.answer(writer, body):
                        break
                finally:
                    self.num_open -= 1
        writer.close()

    async def answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        failure = self.fails(len(self.bodies) - 1, body)
        if failure == "busy":
            writer.write(_whole(429, '{"error": {"message": "too many requests"}}'))
            return True
        if failure == "drop":
            return False
        if failure == "html":
            writer.write(_whole(200, "<html>a proxy's page</html>", "text/html"))
            return True
        if failure == "compressed":
            writer.write(_whole(200, "data: [DONE]", "text/event-stream", "Content-Encoding: gzip\r\n"))
            return True
        if failure == "moved":
            writer.write(_whole(307, "", headers="Location: https://elsewhere\r\n"))
            return True
        if failure == "never":
            await asyncio.sleep(3600)
        if failure == "no http":
            writer.write(b"what?\r\n\r\n")
            return False
        kind = b"" if failure == "untyped" else b"Content-Type: text/event-stream; charset=utf-8\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind)
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n" if self.keeps_alive else b"Connection: close\r\n\r\n")
        await self.wait(self.first_delay)
        for number in range(body["max_tokens"]):
            if number:
                await self.wait(self.delay)
            if failure == "break" and number:
                return False
            if failure == "error event" and number:
                self.event(writer, {"error": {"message": "the engine died", "code": 500}})
                break
            if failure == "junk" and number:
                self.event(writer, "no event")
                break
            text = "" if failure == "silent" else f" t{number}"
            is_chat = "messages" in body
            choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
            self.event(writer, {"choices": [{"index": 0, **choice, "finish_reason": None}]})
            await writer.drain()
        if self.has_usage and not failure and body.get("stream_options"):
            num_words = len(str(body.get("prompt", body.get("messages"))).split())
            usage = {
                "prompt_tokens": num_words * 2 + 5,
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 5},
            }
            self.event(writer, {"choices": [], "usage": usage})
        self.event(writer, "[DONE]")
        if not self.keeps_alive:
            return False
        writer.write(b"0\r\n\r\n")
        return True

    def event(self, writer: asyncio.StreamWriter, event: Any) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        data = f": a comment\n\ndata: {text}\r\n\r\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(data), data) if self.keeps_alive else data)


def _whole(status: int, text: str, content_type: str = "application/json", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: {content_type}\r\n{headers}Content-Length: {len(text)}\r\n\r\n"
    return (head + text).encode()


@contextlib.asynccontextmanager
async def stand_in(tls: ssl.SSLContext | None = None, **behaviour: Any) -> AsyncIterator[StandIn]:
    """A running one."""
    served = StandIn(**behaviour)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.tasks.append(asyncio.ensure_future(served.serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    served.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
        for task in served.tasks:
            task.cancel()
        await asyncio.gather(*served.tasks, return_exceptions=True)
