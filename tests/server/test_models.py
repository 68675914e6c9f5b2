"""`/v1/models` in OpenAI's form and in Anthropic's."""

import json
from datetime import UTC, datetime

import httpx
import pytest
from anthropic.types import ModelInfo
from openai.types import Model

from tests.server.doubles import MAX_MODEL_LEN, FakeEngine, client_of, make_app

NAMES = ("a", "org/b", "c")
ANTHROPIC = {"anthropic-version": "2023-06-01"}


async def get(path: str = "", engine: FakeEngine | None = None, **options: object) -> httpx.Response:
    async with client_of(make_app(engine or FakeEngine(), served_model_name=NAMES)) as client:
        return await client.get(f"/v1/models{path}", **options)


async def test_every_name_has_a_card():
    body = (await get()).json()
    assert body["object"] == "list"
    for name, card in zip(NAMES, body["data"], strict=True):
        Model.model_validate(card, strict=True)
        assert abs(datetime.now(UTC).timestamp() - card.pop("created")) < 60
        assert card == {
            "id": name,
            "object": "model",
            "owned_by": "octavo",
            "max_model_len": MAX_MODEL_LEN,
            "root": "a",
            "parent": None,
        }
        assert (await get(f"/{name}")).json()["id"] == name


async def test_the_window_is_not_known_while_the_model_is_loading():
    engine = FakeEngine()
    engine.info = None
    assert [card["max_model_len"] for card in (await get("", engine)).json()["data"]] == [None] * 3
    assert (await get("/a", engine, headers=ANTHROPIC)).json()["max_tokens"] is None


@pytest.mark.parametrize("headers", [{}, ANTHROPIC])
async def test_a_name_that_is_not_served_is_not_found(headers):
    response = await get("/d", headers=headers)
    assert response.status_code == 404


async def test_anthropics_clients_get_their_form():
    response = await get(headers=ANTHROPIC)
    body = response.json()
    for model in body["data"]:
        ModelInfo.model_validate_json(json.dumps(model), strict=True)
    created_at = body["data"][0].pop("created_at")
    assert datetime.fromisoformat(created_at).tzinfo == UTC
    assert body["data"][0] == {
        "type": "model",
        "id": "a",
        "display_name": "a",
        "max_input_tokens": MAX_MODEL_LEN,
        "max_tokens": MAX_MODEL_LEN,
        "lifecycle": "active",
    }
    assert (body["has_more"], body["first_id"], body["last_id"]) == (False, "a", "c")
    assert (await get("/org/b", headers=ANTHROPIC)).json()["display_name"] == "org/b"


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({"limit": 2}, ["a", "org/b"], True),
        ({"after_id": "org/b"}, ["c"], False),
        ({"after_id": "a", "limit": 1}, ["org/b"], True),
        ({"after_id": "c"}, [], False),
        ({"before_id": "c"}, ["a", "org/b"], False),
        ({"before_id": "c", "limit": 1}, ["org/b"], True),
        ({"before_id": "a"}, [], False),
    ],
)
async def test_anthropics_pages(query, ids, has_more):
    body = (await get(headers=ANTHROPIC, params=query)).json()
    assert [model["id"] for model in body["data"]] == ids
    assert body["has_more"] == has_more
    assert (body["first_id"], body["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(
    ("query", "param", "says"),
    [
        ({"limit": 0}, "limit", "limit must be greater than or equal to 1."),
        ({"limit": 1001}, "limit", "limit must be less than or equal to 1000."),
        ({"limit": "x"}, "limit", "limit must be a valid integer"),
        ({"after_id": "d"}, "after_id", "after_id"),
        ({"after_id": "a", "before_id": "c"}, "before_id", "before_id"),
    ],
)
async def test_a_page_that_is_none_is_refused(query, param, says):
    response = await get(headers=ANTHROPIC, params=query)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == param
