"""The dashboard's data over HTTP: what the page "Live" shows of the engine, its requests and its latencies."""

import asyncio

import pytest

from tests.server.dashboard.test_pool_image import read
from tests.server.doubles import FakeEngine, client_of, make_app, says

BODY = {"prompt": "a secret wish", "max_tokens": 20}
LIVE, POOL = "/dashboard/data/live", "/dashboard/data/pool"


async def test_it_tells_of_live_requests_and_of_those_that_ended():
    engine = FakeEngine(says("a secret answer", ends=False), step_seconds=0.02)
    async with client_of(make_app(engine)) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"}))
        while not engine.open_requests:
            await asyncio.sleep(0.005)
        response = await client.get(LIVE)
        live = response.json()
        head, flags, tables = read((await client.get(POOL)).content)
        answer = (await asking).json()
        async with asyncio.timeout(5):
            while not (ended := (await client.get(LIVE)).json()["ended"]):
                await asyncio.sleep(0.05)
    assert (live["model"], live["ready"], live["num_open"]) == ("byte-model", True, 1)
    assert (live["open"][0]["id"], live["open"][0]["request_id"]) == (answer["id"], "mine")
    assert live["info"]["block_size"] == 16
    assert live["stats"]["num_running"] == 1
    assert (head["holders"][0]["id"], head["num_blocks"], len(flags)) == (answer["id"], 64, 64)
    assert [flags[block_id] for block_id in tables[0]] == [1] * len(tables[0])
    assert (ended[0]["id"], ended[0]["status"], ended[0]["request_id"]) == (answer["id"], 200, "mine")
    assert "secret" not in response.text


async def test_latencies_are_histograms_whose_differences_make_percentiles():
    engine = FakeEngine(says("abcd"))
    app = make_app(engine)
    async with client_of(app) as client:
        await client.post("/v1/completions", json=BODY)
        found = (await client.get(LIVE)).json()["latencies"]
    assert set(found) == {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    }
    for latency in found.values():
        assert len(latency["counts"]) == len(latency["bounds"]) + 1
        assert latency["bounds"] == sorted(latency["bounds"])
    assert sum(found["time_to_first_token_seconds"]["counts"]) == 1


async def test_while_the_model_loads_there_is_little_to_tell():
    engine = FakeEngine()
    engine.info, engine.is_down = None, True
    async with client_of(make_app(engine)) as client:
        live = (await client.get(LIVE)).json()
        pool = await client.get(POOL)
    assert (live["ready"], live["info"]) == (False, None)
    assert (pool.status_code, pool.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_a_pool_that_is_known_is_not_sent_again():
    async with client_of(make_app(FakeEngine())) as client:
        first = await client.get(POOL)
        number = read(first.content)[0]["number"]
        again = await client.get(POOL, params={"known": number})
        other = await client.get(POOL, params={"known": number + 1})
    assert (again.status_code, again.content) == (204, b"")
    assert (other.status_code, other.content) == (200, first.content)
    assert first.headers["Cache-Control"] == "no-store"


async def test_a_large_pool_travels_packed_to_those_who_take_it():
    engine = FakeEngine()
    engine.num_blocks = 100_000
    async with client_of(make_app(engine)) as client:
        plain = await client.get(POOL, headers={"Accept-Encoding": "identity"})
        packed = await client.get(POOL, headers={"Accept-Encoding": "gzip"})
    assert plain.content == packed.content  # the client has unpacked it
    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Content-Encoding"] == "gzip" and packed.num_bytes_downloaded < len(plain.content) / 10


@pytest.mark.parametrize("path", [LIVE, POOL])
async def test_nobody_but_the_admin_sees_it_where_there_are_keys(path):
    app = make_app(FakeEngine(), api_key=("alice:a",), admin_api_key="root")
    async with client_of(app) as client:
        statuses = [
            (await client.get(path, headers={"Authorization": f"Bearer {key}"})).status_code
            for key in ("", "a", "root")
        ]
    assert statuses == [401, 403, 200]


async def test_it_is_no_part_of_the_described_api():
    paths = make_app(FakeEngine()).openapi()["paths"]
    assert not any(path.startswith("/dashboard") for path in paths)
