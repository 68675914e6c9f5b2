"""A large answer leaves in small writes, and is whole."""

import pytest

from server import json_response
from server.json_response import JsonResponse


@pytest.mark.parametrize("pieces", [[b"{}"], [b"[", b"1" * 1000, b"]"], [b"[" + b"2" * 700, b"", b"]"]])
async def test_pieces_are_sent_in_bounded_writes(monkeypatch, pieces):
    monkeypatch.setattr(json_response, "_MAX_WRITE", 300)
    messages = []

    async def send(message):
        messages.append(message)

    await JsonResponse(pieces, {"x-extra": "1"})({"type": "http"}, None, send)
    start, *parts = messages
    headers = dict(start["headers"])
    whole = b"".join(pieces)
    assert start["status"] == 200
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == str(len(whole)).encode()
    assert headers[b"x-extra"] == b"1"
    assert b"".join(part["body"] for part in parts) == whole
    assert max(len(part["body"]) for part in parts) <= 300
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
