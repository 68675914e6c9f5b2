"""The engine client against a real engine process on a tiny model: updates, aborts, death, hang, drain."""

import asyncio
import os
import signal
from array import array
from dataclasses import replace

import pytest

from scheduler.sampling_params import SamplingParams
from server import engine_client
from server.engine_client import EngineClient
from server.engine_config import EngineConfig
from server.engine_errors import EngineDied, EngineStartError, EngineUnavailable, RequestRejected
from server.ipc import MessageCodec
from server.messages import Rejected, Submit
from tests.models.tiny_models import build, save


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = save(build("llama"), tmp_path_factory.mktemp("tiny"))
    return EngineConfig(
        model_path=str(path),
        dtype="auto",
        device="cpu",
        attention_backend="auto",
        block_size=4,
        num_gpu_blocks_override=200,
        kv_cache_memory=None,
        gpu_memory_utilization=0.9,
        max_model_len=None,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=0,
        cpu_threads=1,
        kv_cache_dtype="auto",
        batch_invariant=False,
        async_scheduling=None,
        enforce_eager=False,
    )


@pytest.fixture
async def client(config):
    client = EngineClient(config, stall_timeout=3.0)
    await client.start()
    yield client
    await client.stop(timeout=0)


def submit(client, request_id="a", max_tokens=8, n=1, prompt=(5, 6, 7)):
    params = SamplingParams(max_tokens=max_tokens, n=n, temperature=0.0, ignore_eos=True)
    return client.submit(Submit(request_id, list(prompt), params, arrival_time=0.0))


async def tokens_of(stream):
    tokens = {}
    async for update in stream:
        tokens.setdefault(update.index, []).extend(update.token_ids)
    return tokens


async def until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_request_streams_to_its_end(client):
    tokens = await tokens_of(submit(client, n=3))
    assert {index: len(ids) for index, ids in tokens.items()} == {0: 8, 1: 8, 2: 8}
    assert tokens[0] == tokens[1] == tokens[2]
    assert client.num_open_requests == 0
    assert client.stats.num_generation_tokens >= 8


async def test_many_at_once_get_what_each_gets_alone(client):
    prompts = {f"r{i}": [3 + i, 40 + i, 90] for i in range(20)}
    alone = {name: await tokens_of(submit(client, name, prompt=prompt)) for name, prompt in prompts.items()}
    streams = {name: submit(client, name, prompt=prompt) for name, prompt in prompts.items()}
    together = await asyncio.gather(*(tokens_of(stream) for stream in streams.values()))
    assert dict(zip(streams, together, strict=True)) == alone


async def test_abort_ends_the_stream_and_frees_the_blocks(client):
    stream = submit(client, "long", max_tokens=200, n=2)
    updates = aiter(stream)
    await anext(updates)
    client.abort("long", index=0)
    client.abort("long")
    with pytest.raises(StopAsyncIteration):
        while True:
            await anext(updates)
    await until(lambda: client.stats.num_used_blocks == 0 and client.stats.num_running == 0)
    client.abort("long")  # once more is no error


async def test_the_engine_says_what_happens_to_requests(client):
    """Live ones when asked, those that end without being asked, before their streams do; none once it is lost."""
    ended = {}

    def take(report):
        ended[report.request_id] = report, client.num_open_requests

    client.on_report = take
    stream = submit(client, "live", max_tokens=200, n=2, prompt=range(3, 13))
    updates = aiter(stream)
    await anext(updates)
    (report,) = await client.inspect(["live", "unknown"])
    assert (report.request_id, report.state, report.num_prompt_tokens, report.ended_time) == (
        "live",
        "running",
        10,
        None,
    )
    assert all(sequence.block_ids for sequence in report.sequences)
    client.abort("live")
    await tokens_of(submit(client, "short", max_tokens=3))
    await until(lambda: ended.keys() == {"live", "short"})
    assert await client.inspect(["live", "short"]) == []
    assert [s.finish_reason for s in ended["live"][0].sequences] == ["abort", "abort"]
    short, num_open = ended["short"]
    assert (short.num_generated_tokens, num_open) == (3, 1), "its stream is still open"
    assert short.queued_time <= short.admitted_time <= short.first_token_time <= short.ended_time
    os.kill(client.process_id, signal.SIGSTOP)
    asking = asyncio.create_task(client.inspect(["live"]))
    await asyncio.sleep(0.05)
    os.kill(client.process_id, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(asking, timeout=4)
    assert not client.ready
    with pytest.raises(EngineUnavailable, match="is starting"):  # at once: nobody waits for the model to be loaded
        await asyncio.wait_for(client.inspect(["live"]), timeout=0.1)


async def test_the_engine_says_who_holds_which_blocks(client):
    stream = submit(client, "live", max_tokens=150, n=2, prompt=range(3, 13))
    await anext(aiter(stream))
    report = (await client.inspect_pool()).report
    assert (report.block_size, len(report.is_cached)) == (4, 200)
    assert [(holder.request_id, holder.index) for holder in report.holders] == [("live", 0), ("live", 1)]
    tables, told = [], iter(array("i", report.block_ids))
    for holder in report.holders:
        assert (holder.num_prompt_tokens, holder.num_blocks) == (10, -(-holder.num_computed_tokens // 4))
        tables.append([next(told) for _ in range(holder.num_blocks)])
    assert next(told, None) is None
    first, second = tables
    assert first[:2] == second[:2] and not set(first[2:]) & set(second[2:])  # they share the full blocks of the prompt
    assert all(report.is_cached[block_id] == 1 for block_id in first[:2])
    client.abort("live")
    await until(lambda: client.stats.num_used_blocks == 0)
    assert (await client.inspect_pool()).report.holders == ()


async def test_a_request_that_cannot_fit_is_rejected_with_its_field(client):
    with pytest.raises(RequestRejected, match="max_tokens") as rejected:
        await tokens_of(submit(client, max_tokens=100_000))
    assert rejected.value.param == "max_tokens"
    assert await tokens_of(submit(client))


async def test_a_request_that_is_rejected_for_a_shortage_may_be_sent_again(client):
    stream = submit(client, max_tokens=200)
    client._connection.data_received(MessageCodec(None).encode(Rejected("a", "No memory.", is_shortage=True)))
    with pytest.raises(EngineUnavailable, match="No memory"):
        await tokens_of(stream)


async def test_a_killed_engine_fails_open_requests_at_once_and_comes_back(client):
    stream = submit(client, max_tokens=200)
    await anext(aiter(stream))
    first_process = client.process_id
    os.kill(first_process, signal.SIGKILL)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(tokens_of(stream), timeout=5)
    assert not client.ready
    with pytest.raises(EngineUnavailable):
        submit(client)
    await until(lambda: client.ready)
    assert client.process_id != first_process
    assert len((await tokens_of(submit(client)))[0]) == 8


async def test_a_silent_engine_is_not_ready_and_is_again_when_it_speaks(client):
    os.kill(client.process_id, signal.SIGSTOP)
    await until(lambda: not client.ready)
    os.kill(client.process_id, signal.SIGCONT)
    await until(lambda: client.ready)


async def test_a_hung_engine_is_killed_and_replaced(config):
    client = EngineClient(config, stall_timeout=1.5)
    await client.start()
    hung = client.process_id
    stream = submit(client, max_tokens=200)
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(tokens_of(stream), timeout=20)
    await until(lambda: client.ready)
    assert client.process_id != hung
    await client.stop(timeout=0)


async def test_a_restart_that_finds_no_resources_is_tried_again(client, monkeypatch):
    spawn = engine_client._spawn
    attempts = []

    async def spawn_at_the_third_attempt(connection):
        attempts.append(connection)
        if len(attempts) < 3:
            raise OSError(24, "Too many open files")
        return await spawn(connection)

    monkeypatch.setattr(engine_client, "_spawn", spawn_at_the_third_attempt)
    os.kill(client.process_id, signal.SIGKILL)
    await until(lambda: len(attempts) == 3 and client.ready)
    assert len((await tokens_of(submit(client)))[0]) == 8


async def test_an_engine_that_cannot_be_started_again_is_given_up(client, monkeypatch):
    async def no_process(connection):
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(engine_client, "_spawn", no_process)
    os.kill(client.process_id, signal.SIGKILL)
    await asyncio.wait_for(client.failed.wait(), timeout=10)
    assert not client.ready


async def test_files_in_the_working_directory_are_not_run(config, tmp_path, monkeypatch):
    (tmp_path / "server.py").write_text("raise SystemExit('the wrong server')")
    monkeypatch.chdir(tmp_path)
    client = EngineClient(config)
    await client.start()
    await client.stop(timeout=0)


async def test_a_token_without_an_embedding_is_rejected_and_ends_nobody_else(client):
    other = submit(client, "other", max_tokens=50)
    with pytest.raises(RequestRejected, match="ids go from 0 to 210"):
        await tokens_of(submit(client, prompt=(5, 211)))
    assert len((await tokens_of(other))[0]) == 50


async def test_sigterm_to_the_engine_itself_does_not_cut_answers_short(client):
    stream = submit(client, max_tokens=100)
    os.kill(client.process_id, signal.SIGTERM)
    assert len((await tokens_of(stream))[0]) == 100


async def test_draining_lets_open_requests_finish_and_takes_no_new_ones(config):
    client = EngineClient(config)
    await client.start()
    process_id = client.process_id
    reading = asyncio.create_task(tokens_of(submit(client, max_tokens=100)))
    stopping = asyncio.create_task(client.stop(timeout=30))
    await asyncio.sleep(0)
    assert not client.ready
    with pytest.raises(EngineUnavailable):
        submit(client, "late")
    assert len((await reading)[0]) == 100
    await stopping
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


async def test_what_is_left_after_the_drain_gets_an_error(config):
    client = EngineClient(config)
    await client.start()
    stream = submit(client, max_tokens=240)
    await client.stop(timeout=0)
    with pytest.raises(EngineDied, match="shutting down"):
        await tokens_of(stream)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_path": "/nowhere/model.gguf"}, "does not exist"),
        ({"max_model_len": 1_000_000}, "--max-model-len 1000000"),
        ({"num_gpu_blocks_override": None, "kv_cache_memory": 10}, "--kv-cache-memory"),
    ],
)
async def test_a_start_that_cannot_work_says_why(config, change, message):
    with pytest.raises(EngineStartError, match=message):
        await EngineClient(replace(config, **change)).start()
