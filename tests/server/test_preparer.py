"""Large requests are prepared in another process: with the same results as here, and no harm when it is lost."""

import asyncio
import errno
import json
import os
import queue
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from server import preparer as preparer_module
from server.chat_preparation import prepare_chat
from server.embedding import prepare_embedding
from server.errors import ApiError, ContextLengthExceeded, InvalidRequest, ServiceUnavailable
from server.ipc import send_payload
from server.messages_preparation import count_message_tokens, prepare_message
from server.preparation import prepare_completion
from server.preparer import MAX_SMALL, Preparer, ProcessLost
from server.responses_preparation import count_input_tokens, prepare_response
from server.served_model import ServedModel, longest_token
from server.tokenization import detokenise_body, tokenise_body
from tests.server import real_tokenizers

TEXT = "The time machine stood before us. " * 1000
LARGE = b"x" * (MAX_SMALL + 1)
CONVERSATION = [
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "?"},
]
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


# Run by the process, which imports this module for them.


def process_id(_body: bytes, _model: ServedModel) -> int:
    return os.getpid()


def fail(_body: bytes, _model: ServedModel) -> None:
    raise ZeroDivisionError


def be_no_data(_body: bytes, _model: ServedModel) -> object:
    return object()


def refuse(_body: bytes, _model: ServedModel) -> None:
    raise ServiceUnavailable("later", "a_code", retry_after=7)


def refuse_with_no_data(_body: bytes, _model: ServedModel) -> None:
    error = InvalidRequest("no")
    error.param = object()  # type: ignore[assignment]  # the fault
    raise error


def hang(_body: bytes, _model: ServedModel) -> None:
    time.sleep(60)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    tokenizer = real_tokenizers.smollm2()
    return ServedModel(("m",), tokenizer, longest_token(tokenizer), tokenizer.vocab_size, 16384, 576)


@pytest.fixture(scope="module")
def preparer(smollm2_path: Path, model: ServedModel) -> Iterator[Preparer]:
    preparer = Preparer(smollm2_path, model.tokenizer)
    preparer.start()
    yield preparer
    preparer.stop()


BODIES = [
    (prepare_completion, {"prompt": TEXT, "echo": True, "logprobs": 2, "stop": ["\n"], "seed": 1}),
    (prepare_completion, {"prompt": list(range(10000)), "max_tokens": 3, "logit_bias": {"5": 1}, "n": 3, "seed": 1}),
    (
        prepare_completion,
        {"prompt": [TEXT[:999]] * 20, "bad_words": ["so"], "structured_outputs": {"regex": "a"}, "seed": 1},
    ),
    (prepare_chat, {"messages": CONVERSATION, "seed": 1, "unknown": 2**70}),
    (prepare_chat, {"messages": CONVERSATION, "seed": 1, "response_format": SCHEMA}),
    (
        prepare_chat,
        {
            "messages": CONVERSATION,
            "seed": 1,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
        },
    ),
    (prepare_message, {"messages": CONVERSATION, "max_tokens": 5}),
    (count_message_tokens, {"messages": CONVERSATION, "model": "m"}),
    (prepare_response, {"input": TEXT, "metadata": {"a": "b"}, "instructions": "Be brief."}),
    (count_input_tokens, {"input": TEXT}),
    (prepare_embedding, {"input": [TEXT, "short"]}),
    (tokenise_body, {"prompt": TEXT, "return_token_strs": True}),
    (detokenise_body, {"tokens": list(range(10000))}),
]


def without_seed(text: str) -> str:
    """APIs that take no seed draw one."""
    return "".join(part.partition(", ")[2] for part in text.split("seed="))


@pytest.mark.parametrize(("function", "body"), BODIES)
async def test_the_result_is_the_same(preparer, model, function, body):
    encoded = json.dumps(body).encode()
    assert len(encoded) > MAX_SMALL
    there, here = await preparer.run(function, encoded, model), function(encoded, model)
    assert type(there) is type(here)
    assert there == here or without_seed(repr(there)) == without_seed(repr(here))


@pytest.mark.parametrize(
    ("function", "body", "kind"),
    [
        (prepare_completion, {"prompt": TEXT * 20}, ContextLengthExceeded),
        (prepare_completion, {"prompt": TEXT, "temperature": 5}, InvalidRequest),
        (prepare_chat, {"messages": [{"role": "robot", "content": TEXT}]}, InvalidRequest),
        (prepare_message, {"messages": CONVERSATION}, InvalidRequest),
    ],
)
async def test_the_refusal_is_the_same(preparer, model, function, body, kind):
    encoded = json.dumps(body).encode()
    with pytest.raises(kind) as there:
        await preparer.run(function, encoded, model)
    with pytest.raises(kind) as here:
        function(encoded, model)
    assert type(there.value) is type(here.value)
    assert vars(there.value) == vars(here.value)
    assert str(there.value) == str(here.value)


async def test_an_error_keeps_what_belongs_to_it(preparer, model):
    with pytest.raises(ApiError) as error:
        await preparer.run(refuse, LARGE, model)
    assert (error.value.status, error.value.code, error.value.headers) == (503, "a_code", {"Retry-After": "7"})


async def test_only_large_bodies_go_to_the_other_process(preparer, model):
    assert await preparer.run(process_id, LARGE[1:], model) == os.getpid()
    others = await asyncio.gather(*(preparer.run(process_id, LARGE, model) for _ in range(20)))
    assert len(set(others)) == 1
    assert os.getpid() not in others


@pytest.mark.parametrize("function", [fail, be_no_data, refuse_with_no_data])
async def test_a_fault_of_ours_ends_one_request_only(preparer, model, function):
    before = await preparer.run(process_id, LARGE, model)
    with pytest.raises(RuntimeError, match="its log says more"):
        await preparer.run(function, LARGE, model)
    assert await preparer.run(process_id, LARGE, model) == before


def no_more_files(*_args: object, **_options: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


async def test_a_process_that_ends_is_replaced(preparer, model, caplog, monkeypatch):
    before = await preparer.run(process_id, LARGE, model)
    waiting = [asyncio.create_task(preparer.run(hang, LARGE, model)) for _ in range(preparer_module._NUM_CONNECTIONS)]
    await asyncio.sleep(0.1)
    os.kill(before, signal.SIGKILL)
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, ServiceUnavailable)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", no_more_files)
        for _ in range(2):
            assert await preparer.run(process_id, LARGE, model) == os.getpid()
    assert await preparer.run(process_id, LARGE, model) == os.getpid()  # not tried for every request
    monkeypatch.setattr(preparer, "_next_start", 0.0)
    assert await preparer.run(process_id, LARGE, model) not in (before, os.getpid())
    for said in ("is replaced", "does not start"):
        assert sum(said in record.getMessage() for record in caplog.records) == 1


async def test_a_process_that_is_stuck_is_replaced(smollm2_path, model, monkeypatch):
    monkeypatch.setattr(preparer_module, "_ANSWER_SECONDS", 2.0)
    preparer = Preparer(smollm2_path, model.tokenizer)
    before = await preparer.run(process_id, LARGE, model)
    with pytest.raises(ServiceUnavailable):
        await preparer.run(hang, LARGE, model)
    assert await preparer.run(process_id, LARGE, model) != before
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    preparer.stop()


def test_a_late_answer_reaches_nobody():
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    process = object.__new__(preparer_module._Process)
    process._free = queue.SimpleQueue()
    process._free.put(ours)
    with pytest.raises(ProcessLost):
        process.ask(b"of one caller", b"")
    with suppress(OSError):
        send_payload(theirs, b"the prompt of that caller")
    with pytest.raises(ProcessLost):
        process.ask(b"of another", b"")
    ours.close()
    theirs.close()


def test_a_process_that_is_not_ready_in_time_is_ended(smollm2_path, model, monkeypatch, caplog):
    started = []
    popen = subprocess.Popen

    def recorded(*args: object, **options: object) -> object:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    monkeypatch.setattr(preparer_module, "_START_SECONDS", 0.05)
    preparer = Preparer(smollm2_path, model.tokenizer)
    preparer.start()
    preparer.stop()
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert "does not start" in caplog.text


async def test_without_a_process_all_is_prepared_here(model, tmp_path, caplog):
    for path in (None, tmp_path / "no-model.gguf"):
        preparer = Preparer(path, model.tokenizer)
        for _ in range(2):
            assert await preparer.run(process_id, LARGE, model) == os.getpid()
        preparer.stop()
    assert sum("does not start" in record.getMessage() for record in caplog.records) == 1


async def test_stopping_ends_the_process(smollm2_path, model):
    preparer = Preparer(smollm2_path, model.tokenizer)
    process = await preparer.run(process_id, LARGE, model)
    preparer.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
