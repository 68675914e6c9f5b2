"""Wild bodies on every POST route: each is answered with 2xx, or with a 4xx that names the field, and does no harm.

A body is a valid one with some of its values, at any depth, replaced by what nobody expects there; or bytes that are
no JSON at all.
"""

import asyncio
import copy
import json
import re
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.data_files import naughty_strings
from tests.server.doubles import FakeEngine, client_of, make_app
from tests.server.example_bodies import BODIES

ROUTES = list(BODIES)
SETTINGS = settings(
    max_examples=120,
    phases=[Phase.generate],  # large bodies shrink for minutes; a failure shows the beginning of its own
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
ANTHROPIC = "/v1/messages"
# Of every API that is spoken here, so that each route also meets the fields of the others.
FIELDS = sorted(
    {field for bodies in BODIES.values() for body in bodies for field in body} | {"constructor", "", "$ref"}
)


def _nested(depth: int, is_object: bool) -> object:
    value: object = "bottom"
    for _ in range(depth):
        value = {"a": value} if is_object else [value]
    return value


NUMBERS = st.sampled_from(
    [
        *(0, -1, 1, 2, -(2**31), 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400, -(10**4000)),
        *(0.5, -0.0, 1e-320, 1e308, -1e308, 999999.0, float("nan"), float("inf"), float("-inf"), 1.0),
    ]
)
STRINGS = st.one_of(
    st.sampled_from(
        ["", " ", "\x00", "\ud800", "a\udfff", "\ufeff", "x" * 70_000, "<|im_start|>", "true", "0", "[", "-1"]
    ),
    st.sampled_from(
        ["auto", "none", "required", "function", "json_object", "json_schema", "text", "image_url", "tool"]
    ),
    st.sampled_from(naughty_strings()),
    st.text(max_size=20),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, STRINGS)
_LARGE = (
    [[], {}, [0] * 5000, [""] * 3000, [[]] * 3000, ["x" * 2000] * 20, [None], [[[]]], {"": None}]
    + [{str(i): i for i in range(3000)}, {"type": "object", "properties": {}}, {"type": "function"}, [{}] * 300]
    + [_nested(depth, is_object) for depth in (8, 64, 190, 500) for is_object in (True, False)]
)
LARGE = st.sampled_from([json.dumps(value) for value in _LARGE]).map(json.loads)  # a fresh one for every draw
WILD = st.one_of(
    SCALARS,
    LARGE,
    st.lists(SCALARS, max_size=4),
    st.dictionaries(st.one_of(st.sampled_from(FIELDS), STRINGS.filter(lambda s: len(s) < 99)), SCALARS, max_size=4),
)


def _places(node: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths to everything inside of a body, but for the depths of what was put there."""
    if len(path) > 8:
        return
    children = node.items() if isinstance(node, dict) else enumerate(node[:8]) if isinstance(node, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from _places(child, (*path, key))


@st.composite
def bent_bodies(draw: st.DrawFn, route: str) -> dict:
    """A valid body with one to four changes."""
    body = copy.deepcopy(draw(st.sampled_from(BODIES[route])))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        change = draw(st.sampled_from(["replace", "replace", "add", "add", "remove", "repeat"]))
        places = list(_places(body))
        if change == "add" or not places:
            objects = [path for path in [(), *places] if isinstance(_at(body, path), dict)]
            _at(body, draw(st.sampled_from(objects)))[draw(st.sampled_from(FIELDS))] = draw(WILD)
            continue
        *path, key = draw(st.sampled_from(places))
        if change == "replace":
            _at(body, path)[key] = draw(WILD)
        elif change == "remove":
            del _at(body, path)[key]
        elif isinstance(_at(body, [*path, key]), list):
            _at(body, path)[key] = _at(body, [*path, key]) * draw(st.sampled_from([2, 40, 2000]))
    return body


def _at(body: object, path: list[str | int] | tuple[str | int, ...]):
    for key in path:
        body = body[key]
    return body


@st.composite
def broken_bytes(draw: st.DrawFn, route: str) -> bytes:
    """A valid body with its bytes cut, flipped, doubled or put among others; or no JSON at all."""
    body = json.dumps(draw(st.sampled_from(BODIES[route]))).encode()
    position = draw(st.integers(0, len(body)))
    junk = draw(
        st.one_of(st.binary(max_size=8), st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\x00", b"\\ud800", b"{", b"//"]))
    )
    depth = draw(st.sampled_from([3, 129, 10_000]))
    return draw(
        st.sampled_from(
            [
                body[:position],
                body[:position] + junk + body[position:],
                body[:position] + junk + body[position + 1 :],
                junk,
                body + body,
                b"\xef\xbb\xbf" + body,
                body.decode().encode("utf-16"),
                b"[" * depth,
                b'{"a":' * depth,
                b"[" * depth + b"]" * depth,
                body[:-1] + b"," + body[1:],  # every key twice
                b"null",
                b"[" + body + b"]",
                b'"text"',
                b"NaN",
                b"1" * 5000,
                b"",
            ]
        )
    )


class Fuzzed:
    """The application over a stand-in engine, for all examples of this file."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.engine = self.runner.run(self._make_engine())
        self.app = make_app(self.engine)

    async def _make_engine(self) -> FakeEngine:
        engine = FakeEngine(bursts=True, chunks=(1, 3))
        engine.info = replace(engine.info, max_model_len=2048)  # the examples tell of tools, byte by byte
        return engine

    def posts(self) -> set[str]:
        """Every path that takes a POST."""
        return {path for path, methods in self.app.openapi()["paths"].items() if "post" in methods}

    def post(self, route: str, content: bytes) -> httpx.Response:
        async def send() -> httpx.Response:
            async with client_of(self.app) as client:
                return await client.post(route, content=content, headers={"content-type": "application/json"})

        return self.runner.run(send())

    def check_unharmed(self, route: str) -> None:
        """Nothing is left in the engine, and the next request is answered."""
        assert self.engine.open_requests == []
        response = self.post(route, json.dumps(BODIES[route][0]).encode())
        assert response.status_code == 200, response.text
        self.engine.submitted.clear()
        self.engine.aborted.clear()


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    fuzzed = Fuzzed()
    yield fuzzed
    fuzzed.runner.close()


def check_answer(route: str, response: httpx.Response, *, names_field: bool) -> None:
    """2xx with a body as it should be, or 4xx in the shape of the route that says what is wrong."""
    sent = response.request.content[:2000]
    assert response.status_code < 500, (response.text, sent)
    if response.status_code < 300:
        _check_success(response)
        return
    assert 400 <= response.status_code < 500
    error = response.json()["error"]
    assert error["message"] and len(error["message"]) < 4096
    if route.startswith(ANTHROPIC):
        assert response.json()["type"] == "error"
        named = re.match(r"[\w.\[\]\"'-]+", error["message"]) and error["type"]
    else:
        assert error["type"] == "invalid_request_error"
        named = error["param"]
    assert named or not names_field or response.status_code == 413, (response.text, sent)


def _check_success(response: httpx.Response) -> None:
    if not response.headers["content-type"].startswith("text/event-stream"):
        response.json()
        return
    assert response.text.endswith("\n\n")
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        data = event[event.index("data: ") + len("data: ") :]
        if data != "[DONE]":
            assert not json.loads(data).get("error"), data


def test_every_post_route_is_fuzzed(fuzzed):
    assert fuzzed.posts() == set(ROUTES)


@pytest.mark.parametrize("route", ROUTES)
def test_examples_are_answered(fuzzed, route):
    for body in BODIES[route]:
        response = fuzzed.post(route, json.dumps(body).encode())
        assert response.status_code == 200, (body, response.text)
        assert "x-octavo-ignored-fields" not in response.headers, response.headers
        _check_success(response)


@pytest.mark.parametrize("route", ROUTES)
def test_bent_bodies_are_answered_or_refused_by_name(fuzzed, route):
    @SETTINGS
    @given(body=bent_bodies(route))
    def check(body: dict) -> None:
        content = json.dumps(body)
        check_answer(route, fuzzed.post(route, content.encode()), names_field=not is_unreadable(content))
        assert fuzzed.engine.open_requests == []

    check()
    fuzzed.check_unharmed(route)


def is_unreadable(content: str) -> bool:
    """No reader of JSON takes it: half a surrogate pair, or a depth without end. No field is to blame then."""
    return bool(re.search(r"\\ud[89a-f]|\[{60}|(\{\"a\": ){60}", content))


@pytest.mark.parametrize("route", ROUTES)
def test_broken_bytes_are_refused(fuzzed, route):
    @SETTINGS
    @given(content=broken_bytes(route))
    def check(content: bytes) -> None:
        check_answer(route, fuzzed.post(route, content), names_field=False)
        assert fuzzed.engine.open_requests == []

    check()
    fuzzed.check_unharmed(route)
