"""Answers are read right out of packets however these are cut, timed by the packets, and what is not whole fails."""

import asyncio
import json
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.completion_stream import RequestFailed
from benchmarks.packet_client import PacketClient, Packets, read_packets

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
TEXTS = (" a", "", " \u00e9\U0001f600", "data: [DONE]")


def events(num_tokens: int = 4) -> list[bytes]:
    """Two completions' pieces, two of a chat's, the usage and the end."""
    usage = {"prompt_tokens": 7, "completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": 5}}
    completions = [{"choices": [{"text": text}], "usage": None} for text in TEXTS[:2]]
    chats = [{"choices": [{"delta": {"role": "assistant", "content": text}}]} for text in TEXTS[2:]]
    data = [json.dumps(each, ensure_ascii=False).encode() for each in (*completions, *chats)]
    data += [json.dumps({"choices": [], "usage": usage}).encode(), b"[DONE]"]
    return [b"data: " + each + b"\n\n" for each in data]


def chunked(bodies: Iterable[bytes]) -> bytes:
    chunks = b"".join(f"{len(body):x}\r\n".encode() + body + b"\r\n" for body in bodies)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def unchunked(bodies: Iterable[bytes]) -> bytes:
    return HEAD + b"\r\n" + b"".join(bodies)


@pytest.mark.parametrize("form", [chunked, unchunked])
@given(cuts=st.lists(st.integers(0, 900), max_size=20))
def test_the_same_answer_however_it_is_cut(form: Callable[[Iterable[bytes]], bytes], cuts):
    stream = form(events())
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    packets = [(100.0 + end, stream[begin:end]) for begin, end in pairwise(places)]
    answer = read_packets(Packets(100.0, tuple(packets), None), 4)
    assert answer.text == "".join(TEXTS)
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.num_cached_tokens) == (7, 4, 5)
    # Each piece has the time of the packet in which its line ended.
    line_ends = [i + 1 for i in range(len(stream)) if stream[i : i + 2] == b"\n\n"]
    with_text = [end for end, text in zip(line_ends, TEXTS, strict=False) if text]
    assert answer.arrivals == tuple(min(place for place in places if place >= end) for end in with_text)


@pytest.mark.parametrize(
    ("packets", "reason"),
    [
        ((), "no whole answer"),
        ((b"HTTP/1.1 503 Busy\r\ncontent-length: 8\r\n\r\ndra", b"ining"), "status 503: draining"),
        ((b"SSH-2.0-OpenSSH\r\n",), "no HTTP"),
        ((unchunked(events()[:-1]),), "broke off"),
        ((unchunked(events(num_tokens=3)),), "3 tokens came, not 4"),
        ((unchunked([b'data: {"error": {"message": "engine died"}}\n\n']),), "error event: engine died"),
        ((unchunked([events()[0], *events()[-2:]]),), "in one piece"),
    ],
)
def test_anything_less_fails(packets, reason):
    error = None if packets else "no whole answer within 1 seconds"
    with pytest.raises(RequestFailed, match=reason):
        read_packets(Packets(0.0, tuple((1.0, packet) for packet in packets), error), 4)


async def serve_once(handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object], timeout: float) -> Packets:
    """What a client gets from a server that does `handle` with the connection, then leaves it open."""
    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await PacketClient(port, timeout).post("/v1/completions", {"prompt": "caf\u00e9"})


async def test_a_request_is_sent_and_its_answer_ends_with_the_last_chunk():
    requests = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        requests.append((head, json.loads(await reader.readexactly(length))))
        writer.write(chunked(events()))
        await reader.read()  # until the client closes: the connection stays open on this side
        writer.close()

    packets = await serve_once(handle, timeout=20)
    assert packets.error is None
    answer = read_packets(packets, 4)
    assert answer.text == "".join(TEXTS)
    assert 0 < answer.first_token_seconds < 20
    ((head, body),) = requests
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert body == {"prompt": "caf\u00e9"}


async def test_an_answer_ends_when_the_server_closes():
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(unchunked(events()))
        await writer.drain()
        writer.close()

    assert read_packets(await serve_once(handle, timeout=20), 4).text == "".join(TEXTS)


async def test_a_server_that_says_nothing_is_given_up():
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    packets = await serve_once(handle, timeout=0.05)
    with pytest.raises(RequestFailed, match=r"no whole answer within 0\.05 seconds"):
        read_packets(packets, 4)


async def test_nobody_listens(unused_tcp_port):
    packets = await PacketClient(unused_tcp_port, 5).post("/", {})
    with pytest.raises(RequestFailed, match=r"Connect call failed|refused"):
        read_packets(packets, 4)
