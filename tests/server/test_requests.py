"""`GET /v1/requests/{id}`: every route's answers can be asked for, live and ended, by their own key and the admin."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from scheduler.request_report import Preemption, SequenceReport
from server.protocol.request_reports import RequestDetails
from server.request_history import RequestTrace
from server.request_story import MAX_SHOWN_PROMPTS, tell
from tests.server.doubles import FakeEngine, client_of, make_app, report_of, says
from tests.server.test_request_history import lines, report

KEYS = {"api_key": ["alice:ka", "bob:kb"], "admin_api_key": "root"}
BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3},
    "/v1/responses": {"input": "abc", "max_output_tokens": 16},
    "/v1/messages": {"model": "byte-model", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3},
}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def ask(client: httpx.AsyncClient, name: str, given: str = "ka") -> httpx.Response:
    return await client.get(f"/v1/requests/{name}", headers=key(given))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_every_answer_can_be_asked_for(path, stream, caplog):
    caplog.set_level("INFO", "octavo.ended")
    async with client_of(make_app(FakeEngine(), **KEYS)) as client:
        headers = {**key("ka"), "x-request-id": "mine"}
        answer = await client.post(path, headers=headers, json={**BODIES[path], "stream": stream})
        assert answer.status_code == 200, answer.text
        by_header = await ask(client, "mine")
        found = by_header.json()
        assert found["id"] in answer.text, "the answer has the id that it can be asked for by"
        assert (await ask(client, found["id"])).json() == found
        assert (found["endpoint"], found["key"], found["status"], found["request_id"]) == (path, "alice", 200, "mine")
        (prompt,) = found["prompts"]
        assert prompt["state"] == "finished"
        assert (prompt["queue_seconds"], prompt["prefill_seconds"], prompt["decode_seconds"]) == (1.0, 0.5, 1.5)
        assert sum(found["finish_reasons"].values()) == 1
    (line,) = lines(caplog)
    assert (line["id"], line["endpoint"], line["status"]) == (found["id"], path, 200)
    assert "abc" not in json.dumps(line)


async def test_embeddings_can_be_asked_for_by_their_request_id():
    async with client_of(make_app(FakeEngine(), **KEYS)) as client:
        body = {"input": ["a", "bc"], "model": "byte-model"}
        await client.post("/v1/embeddings", headers={**key("ka"), "x-request-id": "e"}, json=body)
        found = (await ask(client, "e")).json()
        assert (found["num_prompts"], found["finish_reasons"]) == (2, {"stop": 2})
        assert [prompt["num_prompt_tokens"] for prompt in found["prompts"]] == [1, 2]


async def test_another_key_finds_nothing_and_the_admin_finds_all():
    async with client_of(make_app(FakeEngine(), **KEYS)) as client:
        headers = {**key("ka"), "x-request-id": "mine"}
        answer = (await client.post("/v1/completions", headers=headers, json=BODIES["/v1/completions"])).json()
        for name in (answer["id"], "mine"):
            assert (await ask(client, name, "ka")).status_code == 200
            assert (await ask(client, name, "root")).status_code == 200
            refused, unknown = await ask(client, name, "kb"), await ask(client, "nothing", "kb")
            assert refused.status_code == unknown.status_code == 404
            assert refused.text.replace(name, "nothing") == unknown.text, "it does not tell whether there is one"
            assert unknown.json()["error"]["code"] == "request_not_found"
        assert (await client.get(f"/v1/requests/{answer['id']}")).status_code == 401


async def test_without_keys_it_is_open():
    async with client_of(make_app(FakeEngine())) as client:
        answer = (await client.post("/v1/completions", json=BODIES["/v1/completions"])).json()
        assert (await client.get(f"/v1/requests/{answer['id']}")).json()["key"] is None


async def test_a_live_request_is_asked_of_the_engine():
    engine = FakeEngine(says("abcdefgh" * 20), step_seconds=0.02)
    async with client_of(make_app(engine)) as client:
        body = {"prompt": "abc", "max_tokens": 100}
        asking = asyncio.create_task(client.post("/v1/completions", headers={"x-request-id": "live"}, json=body))
        while not engine.submitted:
            await asyncio.sleep(0.01)
        found = (await client.get("/v1/requests/live")).json()
        assert (found["status"], found["ended"], found["prompts"][0]["state"]) == (None, None, "running")
        engine.is_down = True
        assert (await client.get("/v1/requests/live")).status_code == 503
        engine.is_down = False
        asking.cancel()


async def test_a_request_that_was_lost_with_the_engine_is_told_of_while_the_engine_is_down():
    engine = FakeEngine(says("abcdefgh"))
    engine.dies_after = 2
    app = make_app(engine)
    engine.on_report = None  # a dead engine tells nothing
    async with client_of(app) as client:
        body = {"prompt": "abc", "max_tokens": 100}
        answer = await client.post("/v1/completions", headers={"x-request-id": "lost"}, json=body)
        assert answer.status_code == 503
        engine.is_down = True
        found = await client.get("/v1/requests/lost")
        assert found.status_code == 200
        assert (found.json()["status"], found.json()["finish_reasons"]) == (503, {"error": 1})


async def test_a_dropped_request_is_remembered_and_logged(caplog):
    caplog.set_level("INFO", "octavo.ended")
    engine = FakeEngine()
    engine.lacks = "no room"
    engine.report_of = lambda message, has_ended: replace(
        report_of(message, has_ended),
        state="dropped",
        admitted_time=None,
        first_token_time=None,
        drop_cause="queue_full",
    )
    async with client_of(make_app(engine)) as client:
        answer = await client.post("/v1/completions", headers={"x-request-id": "d"}, json={"prompt": "abc"})
        assert answer.status_code == 503
        (prompt,) = (await client.get("/v1/requests/d")).json()["prompts"]
        assert (prompt["state"], prompt["drop_cause"]) == ("dropped", "queue_full")
        assert "It was dropped: the queue was full." in prompt["explanation"]
    (line,) = lines(caplog)
    assert (line["status"], line["drop_causes"], line["finish_reasons"]) == (503, {"queue_full": 1}, {"error": 1})


async def test_block_tables_come_with_the_size_of_their_blocks():
    engine = FakeEngine()
    async with client_of(make_app(engine)) as client:
        await client.post("/v1/completions", headers={"x-request-id": "b"}, json={"prompt": "abc"})
        assert (await client.get("/v1/requests/b")).json()["block_size"] == 16
        engine.info = None
        assert (await client.get("/v1/requests/b")).json()["block_size"] is None


async def test_reports_become_series():
    engine = FakeEngine()
    async with client_of(make_app(engine)) as client:
        await client.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 2})
        text = (await client.get("/metrics")).text
    labels = '{engine="0",model_name="byte-model"}'
    for name, total in {
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 0.5,
        "request_inference_time_seconds": 2.0,
        "request_prefill_kv_computed_tokens": 2.0,
    }.items():
        (value,) = (line.split()[-1] for line in text.splitlines() if line.startswith(f"vllm:{name}_sum{labels}"))
        assert float(value) == pytest.approx(total, abs=1e-5), name


def test_who_preempted_is_shown_to_those_who_may_know():
    trace = RequestTrace("cmpl-1", "x", "alice", "model", "/v1/completions", 1)
    others = Preemption(15.0, 0, "cmpl-9-0", "bob", "fair_share", 30, False)
    own = Preemption(16.0, 0, "cmpl-8-3", "alice", "kv_blocks", 0, True)
    trace.reports["cmpl-1-0"] = report("cmpl-1-0", num_preemptions=2, preemptions=(others, own))

    def shown(asker):
        return [preemption.by for preemption in tell(trace, {}, asker).prompts[0].preemptions]

    assert shown("alice") == [None, "cmpl-8"]
    assert shown("admin") == ["cmpl-9", "cmpl-8"]


def test_the_story_is_told_in_sentences():
    trace = RequestTrace("cmpl-1", "x", None, "model", "/v1/completions", 1)
    preempted = Preemption(15.0, 0, "cmpl-9-0", "", "priority", 30, True)
    live = report(
        "cmpl-1-0",
        state="preempted",
        wait_seconds={"behind_others": 1.25, "kv_blocks": 2.0},
        wait_reason="kv_blocks",
        admitted_time=12.0,
        num_cached_tokens=4,
        first_difference=6,
        num_recomputed_tokens=9,
        num_preemptions=1,
        preemptions=(preempted,),
        sequences=(SequenceReport(0, "preempted", 9, 0, 9, 0, (), 2),),
    )
    (prompt,) = tell(trace, {"cmpl-1-0": live}, None).prompts
    assert prompt.explanation == [
        "It has waited 2.000 s for KV blocks, 1.250 s behind other requests. It waits at this moment, for KV blocks.",
        "It first ran 2.000 s after it was queued.",
        "4 of its 8 prompt tokens were cached; token 6 is the first that differs from what was.",
        "It was preempted once, because a request of a better priority came; 1 of these times its KV blocks were kept "
        "in host memory. 9 of its tokens were computed again.",
    ]
    assert prompt.sequences[0].num_swapped_blocks == 2


@pytest.mark.parametrize(("status", "sentence"), [(None, "has not got it yet"), (400, "did not take it")])
def test_a_prompt_without_a_report_is_not_hidden(status, sentence):
    trace = RequestTrace("cmpl-1", "x", None, "model", "/v1/completions", 100, status=status)
    details = tell(trace, {}, None)
    assert isinstance(details, RequestDetails)
    assert (details.num_prompts, len(details.prompts)) == (100, MAX_SHOWN_PROMPTS)
    assert sentence in details.prompts[0].explanation[0]
