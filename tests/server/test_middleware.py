"""What happens to every request: whose key it brings, which pages may send it, and what the log says of it."""

import logging

import pytest

from server.config import Settings, load_settings
from server.settings_error import SettingsError
from tests.server.doubles import FakeEngine, client_of, make_app

BODY = {"prompt": "a secret wish\nof mine", "max_tokens": 1}
PAGE = {"Origin": "https://chat.example"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_the_log_names_the_holder_of_a_key_and_never_the_key(caplog):
    caplog.set_level(logging.DEBUG)
    app = make_app(FakeEngine(), api_key=("alice:sesame", "open"), admin_api_key="root")
    async with client_of(app) as client:
        for key in ("sesame", "open", "root", "wrong"):
            await client.post("/v1/completions", json=BODY, headers=bearer(key))
        await client.post("/v1/completions", json=BODY)
    lines = [r.getMessage() for r in caplog.records if r.name == "octavo.access"]
    assert [line.rpartition(" key=")[2] for line in lines[:3]] == ["alice", "key-2", "admin"]
    assert not any(" key=" in line for line in lines[3:])
    text = caplog.text
    assert not any(secret in text for secret in ("sesame", "wrong", "a secret wish"))


async def test_looking_again_and_again_fills_no_log(caplog):
    """A page that follows a request asks for it several times a second; a program that asks for work is told of."""
    caplog.set_level(logging.INFO, "octavo.access")
    async with client_of(make_app(FakeEngine(), admin_api_key="root")) as client:
        answered = await client.post("/v1/completions", json=BODY)
        caplog.clear()
        for path in (
            f"/v1/requests/{answered.json()['id']}",
            "/dashboard",
            "/health",
            "/dashboard/data/live",
            "/metrics",
        ):
            assert (await client.get(path, headers=bearer("root"))).status_code in (200, 404), path
        assert not [r.getMessage() for r in caplog.records if r.name == "octavo.access"]
        await client.get("/dashboard/data/live", headers=bearer("wrong"))
        await client.get("/v1/requests", headers=bearer("root"))
    lines = [r.getMessage() for r in caplog.records if r.name == "octavo.access"]
    assert [line.split()[:3] for line in lines] == [
        ["GET", "/dashboard/data/live", "401"],
        ["GET", "/v1/requests", "404"],
    ]


async def test_routes_learn_whose_key_it_is():
    app = make_app(FakeEngine(), api_key=("alice:a",))
    names = []

    async def watch(scope, receive, send):
        await app(scope, receive, send)
        names.append(scope["state"]["key_name"])

    async with client_of(watch) as client:
        await client.get("/v1/models", headers=bearer("a"))
        await client.get("/v1/models", headers=bearer("b"))
    assert names == ["alice", None]


async def test_the_admin_key_opens_everything_and_alone_the_metrics():
    async with client_of(make_app(FakeEngine(), api_key=("alice:a",), admin_api_key="root")) as client:
        statuses = {
            (path, key): (await client.get(path, headers=bearer(key))).status_code
            for path in ("/metrics", "/v1/models", "/version")
            for key in ("a", "root", "x")
        }
        forbidden = (await client.get("/metrics", headers=bearer("a"))).json()["error"]
    assert statuses == {
        ("/metrics", "a"): 403,
        ("/metrics", "root"): 200,
        ("/metrics", "x"): 401,
        ("/v1/models", "a"): 200,
        ("/v1/models", "root"): 200,
        ("/v1/models", "x"): 401,
        ("/version", "a"): 200,
        ("/version", "root"): 200,
        ("/version", "x"): 401,
    }
    assert (forbidden["type"], forbidden["code"]) == ("permission_error", "permission_denied")


async def test_an_admin_key_alone_leaves_the_rest_open():
    async with client_of(make_app(FakeEngine(), admin_api_key="root")) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics/")).status_code == 404
        assert (await client.get("//metrics")).status_code == 404
        assert (await client.get("/metrics", headers=bearer("root"))).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/llm/metrics"])
async def test_a_prefix_opens_nothing(path):
    async with client_of(make_app(FakeEngine(), api_key=("a",), admin_api_key="root", root_path="/llm")) as client:
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers=bearer("a"))).status_code == 403
        assert (await client.get(path, headers=bearer("root"))).status_code == 200
        for health in ("/health", "/health/live", "/health/ready"):
            assert (await client.get(f"/llm{health}")).status_code == 200
        assert (await client.get("/llm/v1/models")).status_code == 401
        assert (await client.get("/llm/v1/models", headers=bearer("a"))).status_code == 200


@pytest.mark.parametrize(("path", "taken"), [("/v1/messages", True), ("/v1/models", True), ("/v1/completions", False)])
async def test_the_header_of_anthropics_clients(path, taken):
    method = "GET" if path == "/v1/models" else "POST"
    async with client_of(make_app(FakeEngine(), api_key=("a",))) as client:
        for headers, good in (
            ({"x-api-key": "a"}, taken),
            ({"x-api-key": "b"}, False),
            ({"x-api-key": "a", **bearer("b")}, False),
            ({"x-api-key": "b", **bearer("a")}, True),
        ):
            response = await client.request(method, path, headers=headers, json={})
            assert (response.status_code != 401) == good


async def test_pages_elsewhere_may_not_use_the_api_by_default():
    async with client_of(make_app(FakeEngine())) as client:
        response = await client.get("/v1/models", headers=PAGE)
        assert "access-control-allow-origin" not in response.headers
        asked = await client.options("/v1/completions", headers={**PAGE, "Access-Control-Request-Method": "POST"})
        assert asked.status_code == 405


@pytest.mark.parametrize(("origins", "shown"), [(("*",), "*"), (("https://chat.example",), "https://chat.example")])
async def test_pages_that_may(origins, shown):
    async with client_of(make_app(FakeEngine(), allowed_origins=origins, api_key=("a",))) as client:
        asking = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        asked = await client.options("/v1/completions", headers=asking)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, shown)
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for headers, status in ((bearer("a"), 200), ({}, 401)):
            response = await client.post("/v1/completions", json=BODY, headers={**PAGE, **headers})
            assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, shown)
            assert "x-request-id" in response.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in response.headers


async def test_other_pages_may_not():
    settings = {"allowed_origins": ("https://a.example",), "allowed_methods": ("GET",), "allow_credentials": True}
    async with client_of(make_app(FakeEngine(), **settings)) as client:
        response = await client.get("/v1/models", headers=PAGE)
        assert "access-control-allow-origin" not in response.headers
        for origin, method, status in (
            ("https://chat.example", "GET", 400),
            ("https://a.example", "POST", 400),
            ("https://a.example", "GET", 200),
        ):
            asking = {"Origin": origin, "Access-Control-Request-Method": method}
            assert (await client.options("/v1/models", headers=asking)).status_code == status


@pytest.mark.parametrize("origins", [(), ("*",), ("https://a.example", "*")])
def test_credentials_need_origins_by_name(origins):
    with pytest.raises(SettingsError, match="--allow-credentials needs --allowed-origins by name"):
        load_settings({"allow_credentials": "true", "allowed_origins": list(origins)})
    assert Settings(allow_credentials=True, allowed_origins=("https://a.example",)).allow_credentials


async def test_prompts_are_logged_only_where_that_is_asked_for(caplog):
    caplog.set_level(logging.DEBUG)
    for asked in (False, True):
        caplog.clear()
        async with client_of(make_app(FakeEngine(), enable_log_requests=asked, max_log_len=24)) as client:
            await client.post(
                "/v1/completions", content=b'{"prompt": "a secret\\n wish"}', headers={"x-request-id": "r1"}
            )
            await client.get("/v1/models")
        lines = [r.getMessage() for r in caplog.records if r.name == "octavo.requests"]
        assert lines == (['id=r1 29 bytes: {"prompt": "a secret\\\\n w'] if asked else [])
        assert ("secret" in caplog.text) == asked


async def test_a_logged_body_stays_in_its_line(caplog):
    caplog.set_level(logging.INFO)
    async with client_of(make_app(FakeEngine(), enable_log_requests=True)) as client:
        await client.post("/v1/completions", content=b"\r\n\x1b[31m\xff2026 ERROR forged")
    line = next(r.getMessage() for r in caplog.records if r.name == "octavo.requests")
    assert line.isprintable()


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/health"])
async def test_health_answers_head(path):
    async with client_of(make_app(FakeEngine())) as client:
        assert (await client.head(path)).status_code == 200


async def test_the_description_knows_the_prefix():
    async with client_of(make_app(FakeEngine(), root_path="/llm")) as client:
        assert (await client.get("/openapi.json")).json()["servers"] == [{"url": "/llm"}]
        assert '"/llm/openapi.json"' in (await client.get("/llm/docs")).text.replace("'", '"')
