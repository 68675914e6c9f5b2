"""The HTTP series: sizes as they went over the wire, classes of status, and what is left out."""

import pytest

from server.error_responses import CLIENT_CLOSED_REQUEST
from server.errors import ApiError
from server.http_metrics import METHODS, UNMATCHED
from server.protocol.messages_answers import OVERLOADED
from tests.server.doubles import FakeEngine, client_of, make_app, says
from tests.server.test_chunk_writer import over_a_socket, written
from tests.server.test_operations import LABELS, metrics_of

__all__ = ["written"]

HANDLER = ("handler", "/v1/completions")


async def test_sizes_of_bodies_are_those_that_were_sent(written):
    async with over_a_socket(make_app(FakeEngine(says("hello" * 20)))) as client:
        num_received = num_sent = 0
        for body in ({"prompt": "ab"}, {"prompt": "abc", "stream": True}, {"prompt": 7.5}):
            response = await client.post("/v1/completions", json=body)
            num_received += int(response.request.headers["content-length"])
            num_sent += len(response.content)
        assert written  # what goes past the application's `send`
        series = await metrics_of(client)
    assert series["http_request_size_bytes_sum", HANDLER] == num_received
    assert series["http_response_size_bytes_sum", HANDLER] == num_sent
    assert series["http_response_size_bytes_count", HANDLER] == 3


async def test_probes_and_scrapes_are_nobodys_errors():
    engine = FakeEngine()
    engine.info = None
    async with client_of(make_app(engine)) as client:
        before = await metrics_of(client)
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/version")).status_code == 200
        after = await metrics_of(client)
    of_http = {key: value for key, value in after.items() if key[0].startswith(("http_", "octavo_http_"))}
    assert of_http == {key: before[key] for key in of_http}
    assert not any(("handler", "/metrics") in key for key in after)


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("Bearer one", 404)])
async def test_errors_are_counted_by_their_status(key, status):
    async with client_of(make_app(FakeEngine(), api_key=("one",), admin_api_key="two")) as client:
        response = await client.get("/nothing", headers={} if key is None else {"Authorization": key})
        assert response.status_code == status
        client.headers["Authorization"] = "Bearer two"
        series = await metrics_of(client)
    assert series["octavo_http_errors_total", ("code", str(status)), *LABELS] == 1
    unmatched = ("handler", "unmatched"), ("method", "GET"), ("status", "4xx")
    assert series["http_requests_total", *unmatched] == 1


async def test_no_request_makes_a_series_that_was_not_there():
    async with client_of(make_app(FakeEngine())) as client:
        before = await metrics_of(client)
        handlers = {dict(labels).get("handler") for _, *labels in before} - {None, UNMATCHED}
        for path in (*handlers, "/nothing", "/docs", "/openapi.json", "/dashboard", "/health", "/metrics"):
            for method in (*METHODS, "BREW"):
                await client.request(method, path)
        after = await metrics_of(client)
    of_http = {key for key in after if key[0].startswith(("http_", "octavo_http_"))}
    assert of_http <= set(before)
    not_taken = ("handler", UNMATCHED), ("method", "PUT"), ("status", "4xx")
    assert after["http_requests_total", *not_taken] > len(handlers) > 10


async def test_every_status_of_an_error_has_its_series():
    def statuses(kind: type[ApiError]) -> set[int]:
        return {kind.status}.union(*map(statuses, kind.__subclasses__()))

    async with client_of(make_app(FakeEngine())) as client:
        series = await metrics_of(client)
    shown = {int(dict(labels)["code"]) for name, *labels in series if name == "octavo_http_errors_total"}
    assert shown == {*statuses(ApiError), OVERLOADED, CLIENT_CLOSED_REQUEST}


@pytest.mark.parametrize("declared", [b"9" * 19, b"\xb2"])
async def test_a_body_that_never_came_has_no_size(declared):
    async with client_of(make_app(FakeEngine(), api_key=("one",))) as client:
        refused = await client.get("/v1/models", headers={"Content-Length": declared})
        assert refused.status_code == 401
        client.headers["Authorization"] = "Bearer one"
        series = await metrics_of(client)
    assert series["http_request_size_bytes_sum", ("handler", UNMATCHED)] == 0
    assert series["http_request_size_bytes_count", ("handler", UNMATCHED)] == 1
