"""What is remembered of requests: to whom it is shown, when its line is logged, and that old ones are forgotten."""

import asyncio
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.request_report import Preemption, PreemptionCause, RequestReport, WaitReason
from server import request_history
from server.api_keys import ADMIN
from server.request_history import RequestHistory, RequestTrace, end_record

LOGGER = "octavo.ended"
PAGE = Path(__file__).parents[2] / "docs" / "requests.md"


def report(request_id: str, **fields) -> RequestReport:
    defaults = {
        "tenant": "alice",
        "priority": 0,
        "state": "finished",
        "arrival_time": 10.0,
        "queued_time": 10.0,
        "report_time": 20.0,
        "num_prompt_tokens": 8,
        "wait_seconds": {"behind_others": 1.0},
    }
    return RequestReport(request_id=request_id, **{**defaults, **fields})


def trace(answer_id="cmpl-1", request_id="x", key_name="alice", num_prompts=1) -> RequestTrace:
    return RequestTrace(answer_id, request_id, key_name, "model", "/v1/completions", num_prompts)


def lines(caplog) -> list[dict]:
    return [json.loads(record.message) for record in caplog.records if record.name == LOGGER]


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level("INFO", LOGGER)


async def test_the_line_waits_for_the_reports_of_all_prompts(caplog):
    history = RequestHistory()
    opened = history.open(trace(num_prompts=2))
    history.take(report("cmpl-1-0", num_generated_tokens=3))
    opened.finish_reasons["stop"] += 2
    history.close(opened, 200)
    assert lines(caplog) == []
    assert history.expects_reports(opened)
    history.take(report("cmpl-1-1", num_generated_tokens=4))
    (line,) = lines(caplog)
    assert (line["id"], line["request_id"], line["key"], line["status"]) == ("cmpl-1", "x", "alice", 200)
    assert (line["completion_tokens"], line["prompt_tokens"], line["finish_reasons"]) == (7, 16, {"stop": 2})
    assert not history.expects_reports(opened)
    history.take(report("cmpl-1-1"))
    history.flush()
    assert len(lines(caplog)) == 1


async def test_the_line_comes_though_the_engine_is_silent(caplog, monkeypatch):
    monkeypatch.setattr(request_history, "_GRACE_SECONDS", 0.01)
    history = RequestHistory()
    history.close(history.open(trace()), 503)
    await asyncio.sleep(0.05)
    (line,) = lines(caplog)
    assert (line["status"], line["prompt_tokens"], line["queue_seconds"]) == (503, 0, None)


async def test_no_line_is_lost_at_the_end(caplog):
    history = RequestHistory()
    history.close(history.open(trace("cmpl-1")), 200)
    history.open(trace("cmpl-2"))
    history.flush()
    assert [line["id"] for line in lines(caplog)] == ["cmpl-1"]


def test_a_line_adds_tokens_up_and_takes_the_longest_times():
    ended = trace(num_prompts=2)
    preempted = Preemption(15.0, 0, "cmpl-9-0", "bob", "kv_blocks", 30, False)
    ended.reports = {
        "cmpl-1-0": report(
            "cmpl-1-0",
            admitted_time=12.0,
            first_token_time=13.0,
            ended_time=19.0,
            num_cached_tokens=4,
            num_recomputed_tokens=5,
            num_preemptions=1,
            preemptions=(preempted,),
        ),
        "cmpl-1-1": report("cmpl-1-1", wait_seconds={"behind_others": 0.5, "grammar": 3.0}, drop_cause="deadline"),
    }
    line = end_record(ended)
    assert (line["queue_seconds"], line["prefill_seconds"], line["decode_seconds"]) == (10.0, 1.0, 6.0)
    assert line["wait_seconds"] == {"behind_others": 1.0, "grammar": 3.0}
    assert (line["prompt_tokens"], line["cached_tokens"], line["recomputed_tokens"]) == (16, 4, 5)
    assert (line["preemptions"], line["preemption_causes"]) == (1, {"kv_blocks": 1})
    assert line["drop_causes"] == {"deadline": 1}


async def test_requests_are_shown_to_their_key_and_the_admin_alone():
    history = RequestHistory()
    alices, bobs = history.open(trace("cmpl-1", "same")), history.open(trace("cmpl-2", "same", "bob"))
    own = history.open(trace("cmpl-3", "cmpl-1", "bob"))  # who chose another one's answer id for his request id
    assert [history.find(name, "alice") for name in ("cmpl-1", "same", "cmpl-2", "nothing")] == [
        alices,
        alices,
        None,
        None,
    ]
    assert [history.find(name, "bob") for name in ("cmpl-2", "same", "cmpl-1")] == [bobs, bobs, own]
    assert [history.find(name, ADMIN) for name in ("cmpl-1", "cmpl-2")] == [alices, bobs]
    assert history.find("same", ADMIN) in (alices, bobs)
    assert history.find("same", None) is None
    assert history.find("cmpl-1", None) is None, "without a key, where one is not needed"
    history.close(alices, 200)
    history.take(report("cmpl-1-0"))
    assert history.find("cmpl-1", "alice") is alices
    assert history.find("cmpl-1", ADMIN) is alices


async def test_where_there_are_no_keys_all_is_shown():
    history = RequestHistory()
    opened = history.open(trace(key_name=None))
    assert history.find("cmpl-1", None) is history.find("x", None) is opened
    assert history.find("cmpl-1", ADMIN) is opened


async def test_of_equal_request_ids_the_latest_is_found_and_outlives_the_first():
    history = RequestHistory(max_ended_requests=1)
    for number in range(3):
        opened = history.open(trace(f"cmpl-{number}", "retried"))
        history.take(report(f"cmpl-{number}-0"))
        history.close(opened, 200)
        assert history.find("retried", "alice") is opened
    assert history.find("cmpl-1", "alice") is None


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans()), max_size=40))
def test_old_requests_are_forgotten(requests):
    """The newest that fit both bounds stay, and nothing of the others."""
    history = RequestHistory(max_ended_requests=4, max_kept_reports=10)
    sizes: dict[str, int] = {}
    for number, (num_prompts, name, is_own) in enumerate(requests):
        opened = history.open(trace(f"a{number}", f"x{name}", "alice" if is_own else "bob", num_prompts))
        for engine_id in opened.engine_ids():
            history.take(report(engine_id))
        history.take(report("unknown-0"))
        opened.status, opened.ended = 200, 0.0
        history.flush()
        sizes[opened.answer_id] = num_prompts
        while len(sizes) > 4 or (sum(sizes.values()) > 10 and len(sizes) > 1):
            del sizes[next(iter(sizes))]
        remembered = {f"a{n}" for n in range(number + 1) if history.find(f"a{n}", ADMIN) is not None}
        assert remembered == sizes.keys()
    kept = {answer_id for by_key in history._by_request_id.values() for answer_id in by_key.values()}
    assert kept <= sizes.keys()
    assert all(history._by_request_id.values())


def test_the_page_names_each_field_and_reason():
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    assert {*end_record(trace()), *get_args(WaitReason), *get_args(PreemptionCause)} <= named
