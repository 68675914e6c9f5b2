"""The counters of tokens against the sum of `usage` over all answers of a real engine, whatever becomes of requests.

On a tiny model, in a pool too small for what runs at once, so that some sequences are preempted and computed again.
"""

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.server_process import ServerProcess, wait_until
from tests.end_to_end.tiny_tokenizer import save_tokenizer
from tests.models.tiny_models import SIZES, build, save

FLAGS = {
    "--api-key": "ann:key-ann,bob:key-bob,cat:key-cat,dan:key-dan",
    "--max-num-seqs": 6,
    "--max-num-queued-reqs": 64,
    "--max-num-batched-tokens": 16,
    "--block-size": 4,
    "--num-gpu-blocks-override": 24,
    "--swap-space": 0,
    "--cpu-threads": 1,
}
PROMPT = [3 + (place * 7) % 40 for place in range(13)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("counted")
    save(build("llama"), path)
    save_tokenizer(path, SIZES["vocab_size"])
    flags = [part for flag, value in FLAGS.items() for part in (flag, str(value))]
    with ServerProcess(path, *flags, "--served-model-name", "tested", key="key-ann") as running:
        yield running


class Caller:
    """Asks with one key, and adds up what he is told."""

    def __init__(self, server: ServerProcess, name: str) -> None:
        self.name = name
        self.told: Counter[str] = Counter()
        self.num_sequences = 0
        self.num_requests = 0
        self.given_up: list[str] = []  # ids of answers
        self._client = httpx.AsyncClient(
            base_url=server.url, timeout=60, headers={"Authorization": f"Bearer key-{name}"}
        )

    async def ask(
        self, path: str = "/v1/completions", *, num_sequences: int = 1, status: int = 200, **body: Any
    ) -> None:
        """A request that is answered as a whole."""
        if path == "/v1/completions":
            body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, **body}
        response = await self._client.post(path, json=body)
        assert response.status_code == status, response.text
        if status == 200:
            self._add(response.json()["usage"])
            self.num_sequences += num_sequences
            self.num_requests += 1

    async def stream(
        self, *, num_chunks: int | None = None, on_chunk: Callable[[], object] = lambda: None, **fields: Any
    ) -> str:
        """A request that is answered piece by piece; go away after so many. What is told last counts."""
        body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, **fields, "stream": True}
        body["stream_options"] = {"include_usage": num_chunks is None, "continuous_usage_stats": True}
        usage, text, answer_id = None, "", ""
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                text += line + "\n"
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    usage, answer_id = chunk.get("usage") or usage, chunk.get("id", answer_id)
                    on_chunk()
                    num_chunks = None if num_chunks is None else num_chunks - 1
                if num_chunks == 0:
                    self.given_up.append(answer_id)
                    break
        assert usage is not None, text
        self._add(usage)
        self.num_sequences += body.get("n", 1)
        self.num_requests += 1
        return text

    async def ends_of_given_up(self) -> Counter[str]:
        """How they ended, by the reports of the requests: the last token may have been made before the server knew."""
        ends: Counter[str] = Counter()
        for answer_id in self.given_up:
            while (report := (await self._client.get(f"/v1/requests/{answer_id}")).json())["ended"] is None:
                await asyncio.sleep(0.01)
            ends.update(report["finish_reasons"])
        return ends

    def _add(self, usage: dict[str, Any]) -> None:
        self.told["prompt"] += usage["prompt_tokens"]
        self.told["generation"] += usage.get("completion_tokens", 0)
        self.told["cached"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def counted(server: ServerProcess) -> dict[str, float]:
    """All series, by name and labels but the two that all have."""
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer key-ann"}).text
    samples = re.findall(r"^(\S+?)(?:\{(.*)\})? (\S+)$", text, flags=re.MULTILINE)
    return {
        name + re.sub(r'(engine|model_name)="[^"]*",?', "", labels).rstrip(","): float(value)
        for name, labels, value in samples
    }


def of_key(series: dict[str, float], what: str, caller: Caller) -> float:
    return series[f'octavo_key_{what}_totalkey="{caller.name}"']


async def test_counters_are_the_sums_of_usage_whatever_becomes_of_requests(server):
    ann, bob, cat, dan = (Caller(server, name) for name in ("ann", "bob", "cat", "dan"))
    others = [[4 + (number * place) % 40 for place in range(11)] for number in range(1, 9)]
    await asyncio.gather(
        *(ann.ask(prompt=prompt) for prompt in others),
        ann.ask(prompt=others[:3], n=2, num_sequences=6),
        ann.ask(prompt="an \x00 end", stop=["\x05", "a"], max_tokens=9),
        ann.ask("/v1/embeddings", input=[PROMPT, PROMPT[:5]], num_sequences=2),
        *(bob.ask(n=3, seed=seed, temperature=1.0, num_sequences=3) for seed in range(4)),
        *(bob.stream(temperature=1.0, n=1 + seed % 2, seed=seed) for seed in range(4)),
        *(cat.stream(num_chunks=number, max_tokens=60, prompt=others[number]) for number in range(1, 6)),
        dan.ask(max_tokens=-1, status=400),
        dan.ask(prompt=[], status=400),
    )
    while not (cat_ends := await cat.ends_of_given_up())["abort"]:  # a slow client may come too late
        await cat.stream(num_chunks=1, max_tokens=60)
    for _ in range(2):  # most of it is in the cache now
        await ann.ask()
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    series = counted(server)
    for caller in (ann, bob, cat, dan):
        assert of_key(series, "prompt_tokens", caller) == caller.told["prompt"], caller.name
        assert of_key(series, "requests", caller) == caller.num_requests, caller.name
    for caller in (ann, bob, dan):
        assert of_key(series, "generation_tokens", caller) == caller.told["generation"], caller.name
    # Of the answers that were given up, those tokens count too that were on their way.
    assert cat.told["generation"] <= of_key(series, "generation_tokens", cat) <= 60 * cat.num_requests
    everyone = Counter[str]()
    for caller in (ann, bob, cat, dan):
        everyone += caller.told
    on_their_way = of_key(series, "generation_tokens", cat) - cat.told["generation"]
    assert series["vllm:prompt_tokens_total"] == everyone["prompt"]
    assert series["vllm:generation_tokens_total"] == everyone["generation"] + on_their_way
    assert series["vllm:prompt_tokens_cached_total"] == everyone["cached"] > 0
    assert series["octavo_engine_generation_tokens_total"] >= series["vllm:generation_tokens_total"]
    assert series["octavo_recomputed_tokens_total"] > 0
    ended = {name: value for name, value in series.items() if name.startswith("vllm:request_success_total")}
    assert sum(ended.values()) == ann.num_sequences + bob.num_sequences + cat.num_sequences
    assert cat_ends.total() == cat.num_sequences
    assert ended['vllm:request_success_totalfinished_reason="abort"'] == cat_ends["abort"]
    assert series["vllm:e2e_request_latency_seconds_count"] == sum(ended.values())
    assert series["vllm:request_generation_tokens_sum"] == series["vllm:generation_tokens_total"]
    assert series["octavo_event_loop_lag_seconds_count"] > 0
    assert series["vllm:iteration_tokens_total_count"] == series["octavo_engine_steps_total"] > 0
    pool = {state: series[f'octavo_kv_blocksstate="{state}"'] for state in ("free", "cached", "used")}
    assert pool["used"] == 0
    assert sum(pool.values()) == 24


async def stream_and_kill_engine(server: ServerProcess, caller: Caller) -> str:
    """The answer to a request whose first chunk ends the engine, once there is another engine."""
    engine, num_restarts = [server.engine_process_id()], server.metric("octavo_engine_restarts_total")
    text = await caller.stream(on_chunk=lambda: engine and os.kill(engine.pop(), signal.SIGKILL), max_tokens=80)
    wait_until(lambda: server.metric("octavo_engine_restarts_total") > num_restarts)
    wait_until(lambda: server.metric("octavo_engine_ready") == 1)
    return text


async def test_an_engine_that_is_lost_takes_no_token_with_it(server):
    dan, before, num_killed = Caller(server, "dan"), counted(server), 1
    while "engine_died" not in await stream_and_kill_engine(server, dan):  # the answer was complete already
        num_killed += 1
    after = counted(server)
    generated = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    # No chunk tells of the first bytes of a character whose last one never came.
    assert dan.told["generation"] <= generated <= dan.told["generation"] + 3
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == dan.told["prompt"]
    assert of_key(after, "generation_tokens", dan) == generated < 80 * num_killed
    assert after["octavo_engine_restarts_total"] == num_killed
    error = 'vllm:request_success_totalfinished_reason="error"'
    assert after[error] - before[error] == 1
    assert set(after) == set(before)
