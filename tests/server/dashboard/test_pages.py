"""The dashboard's files: open to everyone, bounded in what they may do, and whole. Who may see the data beside them."""

import re
from pathlib import Path
from urllib.parse import unquote, urljoin

import pytest

import server.dashboard
from server.dashboard.paths import PAGES, STATIC_PATH
from tests.server.doubles import FakeEngine, client_of, make_app

STATIC = Path(server.dashboard.__file__).with_name("static")
FILES = sorted(path.name for path in STATIC.iterdir())
DATA = "/dashboard/data/anything"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", [*PAGES, *(f"{STATIC_PATH}/{name}" for name in FILES)])
async def test_files_need_no_key_and_may_do_little(path):
    async with client_of(make_app(FakeEngine(), api_key=("a",), admin_api_key="root")) as client:
        response = await client.get(path)
        again = await client.get(path, headers={"If-None-Match": response.headers["ETag"]})
        head = await client.head(path)
    assert response.status_code == head.status_code == 200
    assert (again.status_code, again.content) == (304, b"")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    expected = (STATIC / (PAGES.get(path) or path.rpartition("/")[2])).read_bytes()
    assert response.content == expected


async def test_nothing_else_of_the_disk_is_served():
    async with client_of(make_app(FakeEngine())) as client:
        for name in ("none.js", "..%2fpages.py", "%2e%2e/pages.py", "../pages.py", "..%5cpages.py", "%2fetc%2fpasswd"):
            response = await client.get(f"{STATIC_PATH}/{name}")
            assert response.status_code == 404, name
        assert (await client.post("/dashboard")).status_code == 405


async def test_a_slash_at_the_end_leads_back_whatever_a_proxy_puts_before():
    async with client_of(make_app(FakeEngine(), root_path="/llm", api_key=("a",))) as client:
        for page in PAGES:
            response = await client.get(f"/llm{page}/?a=b")
            assert response.status_code == 307
            assert urljoin(f"http://test/llm{page}/", response.headers["Location"]) == f"http://test/llm{page}"


async def test_pages_find_everything_behind_a_proxy_that_puts_something_before():
    """Every reference is relative, and leads to a file that is served there without a key."""
    async with client_of(make_app(FakeEngine(), root_path="/llm", api_key=("a",))) as client:
        for page in PAGES:
            response = await client.get(f"/llm{page}")
            assert response.status_code == 200
            for reference in re.findall(r'(?:src|href)="([^"]+)"', response.text):
                assert not reference.startswith("/"), reference
                found = await client.get(urljoin(f"http://test/llm{page}", reference))
                assert found.status_code == 200, reference
        assert (await client.get("/llm/dashboard/data/live")).status_code == 401


async def test_without_the_dashboard_there_is_nothing():
    async with client_of(make_app(FakeEngine(), enable_dashboard=False)) as client:
        for path in (*PAGES, "/dashboard/", f"{STATIC_PATH}/style.css", DATA):
            assert (await client.get(path)).status_code == 404, path


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {None: 404, "a": 404, "root": 404}),  # open: whoever asks gets to the routes, where there is none
        ({"admin_api_key": "root"}, {None: 401, "a": 401, "root": 404}),
        ({"api_key": ("a",)}, {None: 401, "a": 403, "root": 401}),
        ({"api_key": ("a",), "admin_api_key": "root"}, {None: 401, "a": 403, "root": 404}),
    ],
)
async def test_data_is_for_the_admin_or_for_everyone_where_there_are_no_keys(settings, expected):
    async with client_of(make_app(FakeEngine(), **settings)) as client:
        found = {
            key: (await client.get(DATA, headers={} if key is None else bearer(key))).status_code for key in expected
        }
    assert found == expected


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_no_spelling_of_a_path_gets_round_the_key(prefix):
    app = make_app(FakeEngine(), api_key=("a",), admin_api_key="root", root_path="/llm")
    for path in (
        "/dashboard/data/live",
        "/dashboard/static/../data/live",
        "/dashboard/static//data/live",
        "/dashboard/static/%2e%2e/data/live",
        "/dashboard//data/live",
        "/dashboard/data%2flive",
        "//dashboard/data/live",
        "/dashboard/data/live/",
    ):
        for key in ("", "a"):
            response = await raw_get(app, prefix + path, key)
            assert response in (401, 403, 404) and (response != 404 or key), (path, key, response)


async def raw_get(app, path: str, key: str) -> int:
    """The status of a request with just this path, which a client's library would tidy up."""
    statuses = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    await app(scope, receive, send)
    return statuses[0]


async def test_keys_without_an_admin_key_are_told_what_is_missing():
    async with client_of(make_app(FakeEngine(), api_key=("a",))) as client:
        response = await client.get(DATA, headers=bearer("a"))
    assert "--admin-api-key" in response.json()["error"]["message"]


def test_pages_and_scripts_name_only_files_that_exist_and_nothing_from_elsewhere():
    for path in STATIC.iterdir():
        text = path.read_text()
        named = re.findall(r"""(?:src|href)="([^"#]+)"|from "([^"]+)"|import\("([^"]+)"\)""", text)
        for reference in (name for names in named for name in names if name):
            assert Path(reference).name in FILES, f"{path.name} names {reference}"
        urls = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not urls, f"{path.name} names {urls}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path.name


def test_every_file_says_what_it_is():
    for path in STATIC.iterdir():
        first = "\n".join(path.read_text().splitlines()[:3])
        assert re.search(r"<!-- |/\* |// ", first), path.name
