"""Whose a request is, what it shares, how long it may take, and what is answered where there is no room or no time."""

import json
import math

import pytest

from server.engine_errors import RequestDropped
from tests.server.doubles import FakeEngine, client_of, make_app, says

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
_CHAT = [{"role": "user", "content": "hi"}]
BODIES = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": _CHAT},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": _CHAT, "max_tokens": 8},
    EMBEDDINGS: {"input": "hi"},
}
KEYS = ("ann:key-ann", "key-of-nobody")


async def submitted(path: str, *, key: str | None = None, settings: dict | None = None, **fields: object):
    """What reaches the engine of a request."""
    engine = FakeEngine()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with client_of(make_app(engine, **(settings or {})), headers=headers) as client:
        answer = await client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    (message,) = engine.submitted
    return message


@pytest.mark.parametrize("path", BODIES)
async def test_every_route_passes_on_whose_it_is_and_what_it_asks_for(path):
    fields = {"cache_salt": "team-1", "cache_prompt": False, "timeout": 20, "queue_timeout": 5.5, "priority": 2}
    message = await submitted(path, key="key-ann", settings={"api_key": KEYS}, **fields)
    assert (message.tenant, message.cache_salt, message.reuses_cache) == ("ann", "team-1", False)
    assert message.priority == 2
    assert message.deadline - message.arrival_time == pytest.approx(20)
    assert message.queue_deadline - message.arrival_time == pytest.approx(5.5)


@pytest.mark.parametrize("path", BODIES)
async def test_without_keys_and_wishes_there_are_no_terms(path):
    message = await submitted(path)
    assert (message.tenant, message.cache_salt, message.reuses_cache, message.priority) == ("", "", True, 0)
    assert (message.deadline, message.queue_deadline) == (None, None)


async def test_the_body_never_says_whose_it_is():
    """Two keys never share, whatever they send; only the salt comes from the caller, and narrows."""
    names = {"user": "ann", "tenant": "ann", "key_name": "ann", "cache_salt": "ann", "prompt_cache_key": "ann"}
    message = await submitted(COMPLETIONS, key="key-of-nobody", settings={"api_key": KEYS}, **names)
    assert message.tenant == "key-2"


@pytest.mark.parametrize(
    ("settings", "fields", "deadline", "queue_deadline"),
    [
        ({"request_timeout": 60, "queue_timeout": 10}, {}, 60, 10),
        ({"request_timeout": 60, "queue_timeout": 10}, {"timeout": 5, "queue_timeout": 2}, 5, 2),
        ({"request_timeout": 60, "queue_timeout": 10}, {"timeout": 500, "queue_timeout": 200}, 60, 10),
        ({}, {"timeout": 0.5}, 0.5, None),
    ],
)
async def test_the_shorter_of_two_times_counts(settings, fields, deadline, queue_deadline):
    message = await submitted(COMPLETIONS, settings=settings, **fields)
    times = [None if t is None else t - message.arrival_time for t in (message.deadline, message.queue_deadline)]
    assert times == [pytest.approx(deadline), None if queue_deadline is None else pytest.approx(queue_deadline)]


@pytest.mark.parametrize("field", ["timeout", "queue_timeout"])
@pytest.mark.parametrize("value", [0, -1, 0.0001, 1e9, math.nan, math.inf, "5", True, [5]])
@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS, MESSAGES])
async def test_a_time_that_is_none_is_refused_by_its_name(path, field, value):
    body = json.dumps({**BODIES[path], field: value})
    async with client_of(make_app(FakeEngine())) as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


DROPS = {
    "queue_full": (429, "rate_limit_error", 429, "rate_limit_error"),
    "queue_timeout": (503, "service_unavailable", 529, "overloaded_error"),
    "deadline": (504, "timeout_error", 504, "timeout_error"),
}


def dropped(cause: str, retry_after: float | None = 12.3) -> FakeEngine:
    engine = FakeEngine(says("abcdef", ends=False))
    engine.drops = RequestDropped("There is no room.", cause, retry_after)
    return engine


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        *((path, False) for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES, EMBEDDINGS)),
        *((path, True) for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES)),
    ],
)
@pytest.mark.parametrize("cause", DROPS)
async def test_a_dropped_request_is_answered_in_the_shape_of_its_api(cause, path, stream):
    """Also a stream: its status waits for the first event."""
    async with client_of(make_app(dropped(cause))) as client:
        answer = await client.post(path, json={**BODIES[path], **({"stream": True} if stream else {})})
    status, kind, messages_status, messages_kind = DROPS[cause]
    error = answer.json()["error"]
    assert error["message"] == "There is no room."
    if path == MESSAGES:
        assert (answer.status_code, error["type"]) == (messages_status, messages_kind)
    else:
        code = "deadline_exceeded" if cause == "deadline" else cause
        assert (answer.status_code, error["type"], error["code"]) == (status, kind, code)
    assert answer.headers.get("retry-after") == (None if cause == "deadline" else "13")
    assert answer.headers.get("x-should-retry") == ("false" if cause == "deadline" else None)


@pytest.mark.parametrize(("retry_after", "told"), [(None, "1"), (0.01, "1"), (59.2, "60"), (1e9, "3600")])
async def test_the_time_to_come_again_is_a_sane_one(retry_after, told):
    async with client_of(make_app(dropped("queue_full", retry_after))) as client:
        answer = await client.post(COMPLETIONS, json=BODIES[COMPLETIONS])
    assert answer.headers["retry-after"] == told


@pytest.mark.parametrize(
    ("path", "sign"), [(COMPLETIONS, "timeout_error"), (CHAT, "timeout_error"), (MESSAGES, "timeout_error")]
)
async def test_a_stream_whose_time_is_over_ends_with_the_error(path, sign):
    engine = dropped("deadline")
    engine.dies_after = 3
    async with client_of(make_app(engine)) as client:
        answer = await client.post(path, json={**BODIES[path], "stream": True})
    assert answer.status_code == 200
    *_, last = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == sign


@pytest.mark.parametrize(
    ("path", "where"),
    [
        (COMPLETIONS, ("usage", "prompt_tokens_details", "cached_tokens")),
        (CHAT, ("usage", "prompt_tokens_details", "cached_tokens")),
        (RESPONSES, ("usage", "input_tokens_details", "cached_tokens")),
        (MESSAGES, ("usage", "cache_read_input_tokens")),
        (EMBEDDINGS, ("usage", "prompt_tokens_details", "cached_tokens")),
    ],
)
async def test_usage_tells_how_much_was_cached(path, where):
    engine = FakeEngine()
    engine.num_cached_tokens = 2
    async with client_of(make_app(engine)) as client:
        found = (await client.post(path, json=BODIES[path])).json()
    for name in where:
        found = found[name]
    assert found == 2


@pytest.mark.parametrize(("path", "param"), [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")])
@pytest.mark.parametrize(
    ("settings", "prompts", "is_refused"),
    [
        ({"max_num_queued_reqs": 3}, ["a"] * 3, False),
        ({"max_num_queued_reqs": 3}, ["a"] * 4, True),
        ({"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}, ["a"] * 40, False),
        ({"max_num_queued_tokens": 10}, ["abcde"] * 2, False),
        ({"max_num_queued_tokens": 10}, ["abcde"] * 3, True),
        ({"max_num_queued_tokens": 10}, ["a" * 50], False),  # one alone always finds room in an empty queue
    ],
)
async def test_more_prompts_than_may_ever_wait_are_the_requests_fault(path, param, settings, prompts, is_refused):
    """Told to come again later, their sender would do so for ever."""
    engine = FakeEngine()
    async with client_of(make_app(engine, **settings)) as client:
        answer = await client.post(path, json={param: prompts})
    assert answer.status_code == (400 if is_refused else 200)
    if is_refused:
        assert answer.json()["error"]["param"] == param
        assert "--max-num-queued" in answer.json()["error"]["message"]
        assert engine.submitted == []


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")])
async def test_when_one_prompt_finds_no_room_the_others_are_not_sent_after_it(path, field):
    engine = FakeEngine()
    engine.drops = RequestDropped("There is no room.", "queue_full", 3.0)
    async with client_of(make_app(engine)) as client:
        answer = await client.post(path, json={**BODIES[path], field: ["a"] * 1000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert len(engine.submitted) < 200
    assert not engine.open_requests
