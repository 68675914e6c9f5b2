"""The bound on open requests and their bodies: who is kept out, that no key takes all the room, and that none leaks."""

import asyncio
from collections import Counter

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.load_gate import BoundedShares
from tests.server.doubles import FakeEngine, client_of, make_app, says

COMPLETIONS = "/v1/completions"
KEYS = ("a:key-a", "b:key-b")


def as_holder(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{name}"}


async def post(client: httpx.AsyncClient, holder: str = "a", **fields: object) -> httpx.Response:
    return await client.post(COMPLETIONS, json={"prompt": "x", **fields}, headers=as_holder(holder))


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@given(
    limit=st.integers(1, 40),
    keeps_room=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 10), st.booleans())),
)
def test_shares_never_exceed_the_limit_and_leave_room_for_whoever_holds_nothing(limit, keeps_room, steps):
    shares = BoundedShares(limit, keeps_room=keeps_room)
    held = Counter()
    for holder, amount, takes in steps:
        if not takes:
            amount = min(amount, held[holder])
            shares.give_back(holder, amount)
            held[holder] -= amount
            continue
        num_free = limit - held.total()
        took = shares.take(holder, amount)
        # Whoever holds nothing gets whatever is free.
        assert took or amount > num_free or (keeps_room and held[holder] > 0)
        assert not took or amount <= num_free
        held[holder] += amount * took
        assert held.total() <= limit
    for holder in list(held):
        shares.give_back(holder, held.pop(holder))
    assert shares.take("a", limit)


def test_a_holder_alone_takes_four_fifths():
    shares = BoundedShares(100, keeps_room=True)
    num_taken = sum(shares.take("a", 1) for _ in range(100))
    assert 78 <= num_taken <= 82
    assert sum(shares.take("b", 1) for _ in range(100)) >= 15


async def test_one_request_too_many_is_told_when_to_come_again_and_others_go_on():
    engine = FakeEngine(says("x" * 50, ends=False), step_seconds=0.01)
    async with client_of(make_app(engine, max_open_requests=2)) as client:
        running = [asyncio.create_task(post(client, max_tokens=20)) for _ in range(2)]
        await until(lambda: len(engine.submitted) == 2)
        refused = await post(client)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_open_requests"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/health")).status_code == 200
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
        assert (await post(client)).status_code == 200


async def test_one_key_does_not_keep_the_others_out():
    engine = FakeEngine(says("x" * 50, ends=False), step_seconds=0.02)
    async with client_of(make_app(engine, max_open_requests=5, api_key=KEYS)) as client:
        burst = [asyncio.create_task(post(client, "a", max_tokens=10)) for _ in range(20)]
        await until(lambda: sum(task.done() for task in burst) >= 15)
        assert (await post(client, "b", max_tokens=1)).status_code == 200
        statuses = Counter(answer.status_code for answer in await asyncio.gather(*burst))
        assert statuses[200] == 4
        assert statuses[429] == 16


@pytest.mark.parametrize("path", ["/v1/messages", COMPLETIONS])
async def test_bodies_that_are_too_much_together_are_refused_in_the_shape_of_their_api(path):
    engine = FakeEngine(says("x" * 50, ends=False), step_seconds=0.01)
    async with client_of(make_app(engine, max_open_body_memory=2048)) as client:
        running = asyncio.create_task(post(client, prompt="x" * 100, max_tokens=20, user="u" * 900))
        await until(lambda: engine.submitted)
        refused = await client.post(path, json={"prompt": "x", "user": "u" * 1024})
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await running).status_code == 200
        assert (await post(client, prompt="x" * 100, user="u" * 1024)).status_code == 200


@pytest.mark.parametrize(("keys", "most"), [([], 4096), (KEYS, 3276)])
async def test_a_body_that_would_never_find_room_is_not_told_to_come_again(keys, most):
    async with client_of(make_app(FakeEngine(), max_open_body_memory=4096, api_key=keys)) as client:
        for size, status in ((5000, 413), (most + 400, 413), (most // 2, 200)):
            body = b'{"max_tokens": 1, "prompt": "x"' + b" " * (size - 32) + b"}"

            async def in_pieces(body=body):
                for start in range(0, len(body), 400):
                    yield body[start : start + 400]

            answer = await client.post(COMPLETIONS, content=in_pieces(), headers=as_holder("a"))
            assert answer.status_code == status, answer.text
            assert "retry-after" not in answer.headers


async def test_whoever_leaves_gives_back_his_place():
    engine = FakeEngine(says("x" * 50, ends=False), step_seconds=0.01)
    async with client_of(make_app(engine, max_open_requests=1)) as client:
        leaving = asyncio.create_task(post(client, max_tokens=40))
        await until(lambda: engine.submitted)
        leaving.cancel()
        await until(lambda: leaving.done() and not engine.open_requests)
        assert (await post(client, max_tokens=1)).status_code == 200
