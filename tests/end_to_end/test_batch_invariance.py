"""`--batch-invariant` through HTTP: an answer is the same byte for byte, log-probabilities included, whether its
request ran alone and its prompt whole, or under load, in chunks, in a pool so small that sequences are preempted."""

import asyncio
from typing import Any

import httpx

from server.tokenizer import load_tokenizer
from tests.data_files import mixed_prompts
from tests.end_to_end.server_process import ServerProcess

FLAGS = ("--served-model-name", "tested", "--batch-invariant")
NUM_TESTED = NUM_NOISE = 8
NUM_TOKENS = 24
MAX_PROMPT_TOKENS = 48
# Prompts in pieces, blocks of another size, and no more of them than the longest sequence needs: two or three prompts
# fit, and each sequence grows by half of that.
CRAMPED_FLAGS = (
    "--max-num-batched-tokens=23",
    "--block-size=4",
    "--num-gpu-blocks-override=18",
    "--cpu-threads=1",
)


def bodies_to_compare(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy and sampled requests; the log-probabilities of every token, and of some prompts'."""
    bodies = [
        {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 5, "return_token_ids": True}
        for prompt in prompts
    ]
    for body in bodies[::2]:
        body["temperature"] = 0
    for seed, body in enumerate(bodies[1::2]):
        body |= {"temperature": 1.0, "seed": seed}
    bodies[1] |= {"n": 2}
    bodies[3] |= {"top_p": 0.9, "top_k": 50}
    bodies[5] |= {"min_p": 0.02}
    bodies[2]["echo"] = bodies[7]["echo"] = True
    return bodies


def bodies_of_noise(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Other requests of every length, with more log-probabilities and other cuts than the tested ones ask for."""
    return [
        {
            "prompt": prompt[: 5 * i + 1],
            "max_tokens": NUM_TOKENS - i,
            "temperature": 0.7 * (i % 3),
            "seed": i,
            "top_k": 3 * (i % 2),
            "top_p": 1.0 - 0.1 * (i % 4),
            "logprobs": 2 * i,
        }
        for i, prompt in enumerate(prompts)
    ]


def answers(url: str, bodies: list[dict[str, Any]], at_once: int) -> list[Any]:
    """The choices of each answer, all but its id and its time, with `at_once` requests in flight."""

    async def run() -> list[Any]:
        gate = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:

            async def one(body: dict[str, Any]) -> Any:
                async with gate:
                    response = await client.post("/v1/completions", json={"model": "tested", **body})
                assert response.status_code == 200, response.text
                return response.json()["choices"]

            return await asyncio.gather(*(one(body) for body in bodies))

    return asyncio.run(run())


def test_answers_do_not_depend_on_load(smollm2_path):
    tokenizer = load_tokenizer(smollm2_path)
    prompts = [tokenizer.encode(text)[:MAX_PROMPT_TOKENS] for text in mixed_prompts()[: NUM_TESTED + NUM_NOISE]]
    tested, noise = bodies_to_compare(prompts[:NUM_TESTED]), bodies_of_noise(prompts[NUM_TESTED:])
    with ServerProcess(smollm2_path, *FLAGS) as server:
        alone = answers(server.url, tested, at_once=1)
    with ServerProcess(smollm2_path, *FLAGS, *CRAMPED_FLAGS) as server:
        mixed = [body for pair in zip(noise, tested, strict=True) for body in pair]
        under_load = answers(server.url, mixed, at_once=len(mixed))
        num_preemptions = server.metric("vllm:num_preemptions_total")
    print(f"{num_preemptions:.0f} preemptions")
    assert num_preemptions > 0
    for expected, got in zip(alone, under_load[1::2], strict=True):
        assert len(expected[0]["token_ids"]) == NUM_TOKENS
        assert got == expected
