"""The limits below the application: heads, bodies and trailers that are too large, too slow, or never end."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn
from uvicorn.server import ServerState

from server.http_protocol import BoundedHttpProtocol

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def echo(scope, receive, send) -> None:
    """Answers with what it received, and with the names of the headers."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    else:
        return
    names = b",".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-names", names)]})
    await send({"type": "http.response.body", "body": body})


async def answer_early(scope, receive, send) -> None:
    """Reads nothing."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def answer_slowly(scope, receive, send) -> None:
    await asyncio.sleep(0.5)
    await echo(scope, receive, send)


@asynccontextmanager
async def serving(app: Callable = echo, **limits: float) -> AsyncIterator[int]:
    protocol = type("Protocol", (BoundedHttpProtocol,), limits)
    config = uvicorn.Config(app, log_config=None, lifespan="off")
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        for connection in list(state.connections):
            connection.transport.abort()


async def exchange(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send pieces, and read until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def error_of(answer: bytes) -> dict:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


async def test_what_keeps_to_the_limits_is_served():
    async with serving() as port:
        close = b"Connection: close\r\n"
        answers = [
            await exchange(port, HEAD + close + b"Content-Length: 5\r\n\r\nhello"),
            await exchange(port, *(bytes([byte]) for byte in HEAD + close + b"Content-Length: 5\r\n\r\nhello")),
            await exchange(
                port, HEAD + close + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
            ),
        ]
        for answer in answers:
            assert status_of(answer) == 200
            assert b"hello" in answer


async def test_a_connection_serves_one_request_after_the_other():
    async with serving() as port:
        last = GET.replace(b"Host", b"Connection: close\r\nHost")
        answer = await exchange(
            port, b"\r\n\r\n", GET, b"\r\n", CHUNKED, b"3\r\nabc\r\n", b"0\r\n\r\n", GET + GET, last
        )
        assert answer.count(b"HTTP/1.1 200") == 5


@pytest.mark.parametrize("num_bytes", [70_000, 200_000, 5_000_000])
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
async def test_large_heads(num_bytes, end):
    async with serving() as port:
        for head in (b"GET / HTTP/1.1\r\nX: " + b"a" * num_bytes, b"GET /" + b"a" * num_bytes + b" HTTP/1.1"):
            answer = await exchange(port, head + end)
            assert not answer or status_of(answer) in (400, 431)
        answer = await exchange(port, GET.replace(b"Host", b"Connection: close\r\nX: " + b"a" * 60_000 + b"\r\nHost"))
        assert status_of(answer) == 200


async def test_a_large_body_does_not_count_as_a_head():
    async with serving() as port:
        body = b"%x\r\n" % 1_000_000 + b"a" * 1_000_000 + b"\r\n0\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED.replace(b"Host", b"Connection: close\r\nHost") + body)
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.write(b"X-Trailer: x\r\n\r\n")
        assert status_of(await reader.read()) == 200
        writer.close()


async def test_trailers_are_bounded_and_are_no_headers():
    async with serving() as port:
        close = CHUNKED.replace(b"Host", b"Connection: close\r\nHost")
        answer = await exchange(port, close + b"1\r\na\r\n0\r\nAuthorization: Bearer x\r\nX-Late: 1\r\n\r\n")
        assert status_of(answer) == 200
        assert b"x-names: connection,host,transfer-encoding\r\n" in answer
        endless = [b"X-%d: " % number + b"a" * 4096 + b"\r\n" for number in range(1000)]
        answer = await exchange(port, close + b"1\r\na\r\n0\r\n", *endless)
        assert not answer or status_of(answer) == 431


async def test_silence_and_slow_heads():
    async with serving(head_seconds=0.2) as port:
        assert await exchange(port) == b""
        assert await exchange(port, b"\r\n") == b""
        answer = await exchange(port, b"GET / HTTP/1.1\r\nX: ", *[b"a"] * 20, pause=0.03)
        assert not answer or (status_of(answer), error_of(answer)["type"]) == (408, "invalid_request_error")


async def test_blank_lines_between_requests_do_not_keep_a_connection():
    async with serving(head_seconds=0.2) as port:
        answer = await exchange(port, GET, b"\r\n", pause=0.05)
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "head", [HEAD + b"Content-Length: 9\r\n\r\nabc", CHUNKED + b"9\r\nabc", CHUNKED + b"9;x=" + b"y" * 99]
)
async def test_bodies_that_stop(head):
    async with serving(idle_body_seconds=0.2) as port:
        answer = await exchange(port, head)
        assert status_of(answer) == 408
        assert "in time" in error_of(answer)["message"]


async def test_bodies_that_drip():
    async with serving(idle_body_seconds=0.2, body_seconds=0.5) as port:
        answer = await exchange(port, HEAD + b"Content-Length: 999\r\n\r\n", *[b"a"] * 30, pause=0.05)
        assert not answer or status_of(answer) == 408


async def test_an_answer_that_takes_long_is_waited_for():
    async with serving(answer_slowly, head_seconds=0.1, idle_body_seconds=0.1, body_seconds=0.1) as port:
        request = HEAD + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello"
        answer = await exchange(port, request, b"\r\n")
        assert answer.endswith(b"hello") or b"hello" in answer


async def test_the_rest_of_a_refused_body_is_not_read_for_long():
    async with serving(answer_early, linger_seconds=0.2) as port:
        answer = await exchange(port, HEAD + b"Content-Length: 1000000\r\n\r\n", *[b"a" * 1000] * 3)
        assert status_of(answer) == 413
        assert answer.endswith(b"no")


async def test_a_client_that_only_asks_is_cut_off():
    async with serving(answer_slowly, max_pipelined=8) as port:
        answer = await exchange(port, GET * 100)
        assert answer.count(b"HTTP/1.1 200") == 0


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\nhello",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        b"GET / HTTP/1.1\r\nA B: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_not_http_is_answered_in_the_same_shape(request_):
    async with serving() as port:
        answer = await exchange(port, request_)
        assert status_of(answer) == 400
        assert error_of(answer)["type"] == "invalid_request_error"
