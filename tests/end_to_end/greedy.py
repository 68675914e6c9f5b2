"""Greedy decoding through HTTP, and transformers as its oracle.

The oracle reads prompt and answer once and says at each position which token it would have taken: if it agrees at
every one, the two greedy answers are equal token for token. Where its two best logits lie closer than TIE, float32
sums in another order may turn either way; such a place is counted, and what follows it is still checked.
"""

import asyncio
from dataclasses import dataclass

import httpx
import torch

TIE = 1e-4
NUM_TOKENS = 64


@dataclass(frozen=True)
class Answer:
    """What one request brought."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


async def _complete(client: httpx.AsyncClient, prompt: tuple[int, ...], max_tokens: int) -> Answer:
    body = {
        "model": "tested",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return Answer(prompt, tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))


def complete(url: str, prompts: list[tuple[int, ...]], at_once: int, max_tokens: int = NUM_TOKENS) -> list[Answer]:
    """Greedy answers to prompts of token ids, with `at_once` requests in flight."""

    async def run() -> list[Answer]:
        gate = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:

            async def one(prompt: tuple[int, ...]) -> Answer:
                async with gate:
                    return await _complete(client, prompt, max_tokens)

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    return asyncio.run(run())


@torch.inference_mode()
def assert_greedy(model: torch.nn.Module, answer: Answer) -> int:
    """Check an answer against transformers; returns the number of ties where it took the other token."""
    ids = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids]])
    first = len(answer.prompt_token_ids) - 1
    logits = model(input_ids=ids).logits[0, first:-1].float()  # [num_tokens, vocab_size]
    chosen = torch.tensor(answer.token_ids)
    behind = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
    assert behind.max() < TIE, f"token {int(behind.argmax())} is {behind.max():.6f} behind the best"
    logprobs = torch.log_softmax(logits, -1).gather(-1, chosen[:, None])[:, 0]
    assert (logprobs - torch.tensor(answer.logprobs)).abs().max() < 1e-3
    return int((chosen != logits.argmax(-1)).sum())
