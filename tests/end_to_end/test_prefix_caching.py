"""The prefix cache on the real model: an answer that begins with cached blocks is the computed one, bit for bit."""

from typing import Any

import httpx
import pytest

from server.tokenizer import load_tokenizer
from tests.data_files import mixed_prompts
from tests.end_to_end.server_process import ServerProcess

BLOCK_SIZE = 16
NUM_TOKENS = 8


def complete(server: ServerProcess, prompt: list[int], **fields: Any) -> tuple[list[Any], int]:
    """The choices with the log-probabilities of every token, and how many prompt tokens were not computed."""
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=60)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "n": 2}],
    ids=["greedy", "two sampled answers"],
)
def test_two_turns_are_the_same_from_the_cache_and_without_it(smollm2, smollm2_path, sampling):
    texts = mixed_prompts()
    tokenizer = load_tokenizer(smollm2_path)
    prompt = tokenizer.encode(" ".join([str(sampling), *texts[:3]]))[:90]
    more = tokenizer.encode(texts[4])
    for turn in range(2):
        computed, num_cached = complete(smollm2, prompt, **sampling, cache_prompt=False)
        assert num_cached == 0
        cached, num_cached = complete(smollm2, prompt, **sampling)
        # The last token is always computed, and of several answers each computes it for itself.
        assert num_cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert cached == computed
        answer = cached[0]["token_ids"]
        assert len(answer) == NUM_TOKENS
        # Of the next prompt all but the last answered token's block is there: nothing has read that token yet.
        before = len(prompt) + NUM_TOKENS - 1
        prompt = [*prompt, *answer, *more[10 * turn : 10 * turn + 9]]
        _, num_cached = complete(smollm2, prompt, **sampling, max_tokens=1)
        assert num_cached == before // BLOCK_SIZE * BLOCK_SIZE
