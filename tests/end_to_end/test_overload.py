"""More than a server can serve, over HTTP: who is refused and told what, who is served all the same, what stays behind.

On a tiny model, with a pool too small for what runs at once, so that sequences are preempted, swapped and recomputed.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.server_process import ServerProcess, wait_until
from tests.end_to_end.tiny_tokenizer import save_tokenizer
from tests.models.tiny_models import SIZES, build, save

NUM_QUEUED, NUM_RUNNING = 12, 4
NUM_TOKENS = 24
FLAGS = {
    "--api-key": "ann:key-ann,bob:key-bob",
    "--max-num-seqs": NUM_RUNNING,
    "--max-num-queued-reqs": NUM_QUEUED,
    "--max-num-batched-tokens": 16,
    "--block-size": 4,
    "--num-gpu-blocks-override": 24,
    "--swap-space": "1MiB",
    "--cpu-threads": 1,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("overloaded")
    save(build("llama"), path)
    save_tokenizer(path, SIZES["vocab_size"])
    flags = [part for flag, value in FLAGS.items() for part in (flag, str(value))]
    with ServerProcess(path, *flags, "--served-model-name", "tested", key="key-ann") as server:
        yield server


def prompt_of(number: int) -> list[int]:
    """13 tokens; no two numbers below 1600 begin alike."""
    return [3 + number % 40, 3 + number // 40, *(3 + (number + place * place) % 40 for place in range(11))]


async def ask(client: httpx.AsyncClient, number: int, key: str = "key-ann", **fields: Any) -> httpx.Response:
    body = {"prompt": prompt_of(number), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    return await client.post("/v1/completions", json={**body, "return_token_ids": True, **fields}, headers=headers)


def client_of(server: ServerProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None))


def token_ids(answer: httpx.Response) -> list[int]:
    return answer.json()["choices"][0]["token_ids"]


def assert_nothing_is_left(server: ServerProcess) -> None:
    wait_until(lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("octavo_kv_host_usage_perc") == 0
    assert server.metric("octavo_kv_cache_integrity_failures_total") == 0


async def test_of_a_burst_of_ten_times_what_fits_the_rest_is_told_when_to_come_again(server):
    async with client_of(server) as client:
        numbers = range(10 * (NUM_QUEUED + NUM_RUNNING))
        answers = await asyncio.gather(*(ask(client, number) for number in numbers))
        served = {number: answer for number, answer in zip(numbers, answers, strict=True) if answer.status_code == 200}
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(served) >= NUM_QUEUED + NUM_RUNNING
        assert refused
        for answer in refused:
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        for number in list(served)[:: max(1, len(served) // 8)]:  # preempted, swapped, recomputed or cached: the same
            alone = await ask(client, number, cache_prompt=False)
            assert token_ids(alone) == token_ids(served[number])
    assert server.metric("vllm:num_preemptions_total") > 0
    assert_nothing_is_left(server)


async def test_a_key_that_asks_for_little_is_served_while_another_fills_the_queue(server):
    async with client_of(server) as client:
        burst = [asyncio.create_task(ask(client, number)) for number in range(100)]
        while not any(task.done() for task in burst):
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*(ask(client, 200 + number, "key-bob", max_tokens=2) for number in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        statuses = {answer.status_code for answer in await asyncio.gather(*burst)}
    assert statuses == {200, 429}
    assert_nothing_is_left(server)


async def test_no_key_finds_what_another_has_cached(server):
    async with client_of(server) as client:

        async def num_cached(key: str, **fields: Any) -> int:
            answer = await ask(client, 999, key, max_tokens=1, **fields)
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [await num_cached("key-ann") for _ in range(2)] == [0, 12]
        assert [await num_cached("key-bob") for _ in range(2)] == [0, 12]
        assert [await num_cached("key-bob", cache_salt="ann") for _ in range(2)] == [0, 12]
        assert await num_cached("key-ann", cache_prompt=False) == 0


async def test_whose_time_is_over_is_told_so_before_it_runs_or_in_the_middle(server):
    enough = asyncio.Event()

    async def ask_on(client: httpx.AsyncClient, number: int) -> None:
        while not enough.is_set():
            assert (await ask(client, number, max_tokens=70)).status_code == 200

    async with client_of(server) as client:
        # However fast the machine, there are more of them than run at once until it is enough.
        busy = [asyncio.create_task(ask_on(client, number)) for number in range(NUM_QUEUED)]
        await asyncio.to_thread(wait_until, lambda: server.metric("vllm:num_requests_waiting") > NUM_QUEUED // 2)
        late, impatient = await asyncio.gather(
            ask(client, 50, "key-bob", timeout=0.001), ask(client, 51, "key-ann", priority=9, queue_timeout=0.001)
        )
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert (impatient.status_code, impatient.json()["error"]["code"]) == (503, "queue_timeout")
        streamed = await ask(client, 52, "key-bob", timeout=0.25, max_tokens=70, n=4, stream=True)
        *_, last = [line for line in streamed.text.splitlines() if line]
        if streamed.status_code == 200 and last != "data: [DONE]":  # a fast machine may be through with it
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        enough.set()
        await asyncio.gather(*busy)
    assert_nothing_is_left(server)
