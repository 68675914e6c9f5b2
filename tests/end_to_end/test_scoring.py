"""`echo` with `logprobs` and `max_tokens` 0 scores prompts as transformers does on the same float32 weights.

Evaluations are built on it. The prompts span several steps, next to others that are scored at the same time.
"""

import asyncio

import httpx
import pytest
import torch

from server.tokenizer import Tokenizer
from tests.data_files import humaneval_prompts, mgsm_prompts, mixed_prompts
from tests.end_to_end.conftest import Cramped
from tests.end_to_end.server_process import ServerProcess
from tests.server import real_tokenizers

NUM_TOP = 5
TOLERANCE = 1e-3


def long_prompt(tokenizer: Tokenizer, num_tokens: int) -> str:
    """Code and eleven languages: one text of a bit more than so many tokens."""
    texts = [*humaneval_prompts()[:3], *(texts[0] for texts in mgsm_prompts().values()), *humaneval_prompts()[3:]]
    for count in range(1, len(texts)):
        text = "\n\n".join(texts[:count])
        if len(tokenizer.encode(text)) > num_tokens:
            return text
    raise AssertionError("the texts are too short")


def score(url: str, prompts: list[str], **fields: object) -> list[dict]:
    """The choices for prompts that are sent at the same time, each in a request of its own."""

    async def run() -> list[dict]:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            body = {"echo": True, "logprobs": NUM_TOP, "max_tokens": 0, "temperature": 0, **fields}
            responses = await asyncio.gather(
                *(client.post("/v1/completions", json={"prompt": p, **body}) for p in prompts)
            )
        assert all(response.status_code == 200 for response in responses), responses[0].text
        return [response.json()["choices"][0] for response in responses]

    return asyncio.run(run())


@torch.inference_mode()
def assert_scores(oracle: torch.nn.Module, tokenizer: Tokenizer, prompt: str, choice: dict) -> None:
    """Every token's log-probability, and the likeliest beside it, are the oracle's."""
    token_ids = tokenizer.encode(prompt)
    logits = oracle(input_ids=torch.tensor([token_ids])).logits[0, :-1]
    logprobs = choice["logprobs"]
    assert choice["text"] == prompt
    assert len({len(values) for values in logprobs.values()} | {len(token_ids)}) == 1
    assert logprobs["tokens"] == [tokenizer.token_text(token_id) for token_id in token_ids]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)

    ours = torch.tensor(logprobs["token_logprobs"][1:], dtype=torch.float64)
    total = logits.logsumexp(-1, keepdim=True)
    theirs = (logits.gather(-1, torch.tensor(token_ids[1:])[:, None]) - total)[:, 0]
    assert bool(((ours - theirs).abs() < TOLERANCE).all())
    best = (logits.topk(NUM_TOP, -1).values - total).tolist()
    for top, logprob, wanted in zip(logprobs["top_logprobs"][1:], ours.tolist(), best, strict=True):
        # The token that came stands among the likeliest, as one of them or beside them.
        values = sorted(top.values(), reverse=True)
        assert logprob in values
        assert len(values) <= NUM_TOP + 1
        if len(values) >= NUM_TOP:  # of two tokens with the same text only one is shown
            assert values[:NUM_TOP] == pytest.approx(wanted, abs=TOLERANCE)


def assert_offsets(prompt: str, choice: dict) -> None:
    """Each token's text begins where `text_offset` says."""
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or prompt[offset:].startswith(token) or token.startswith("<")


def test_smollm2_scores_prompts_as_transformers_does(smollm2: ServerProcess, smollm2_reference) -> None:
    tokenizer = real_tokenizers.smollm2()
    prompts = [long_prompt(tokenizer, 512), *mixed_prompts()[8::16], "A"]  # the long one takes two steps
    choices = score(smollm2.url, prompts)
    for prompt, choice in zip(prompts, choices, strict=True):
        assert_scores(smollm2_reference, tokenizer, prompt, choice)
        assert_offsets(prompt, choice)
    # Evaluations that also want the next token get the same scores, in vLLM's form too.
    (longer,) = score(smollm2.url, prompts[1:2], max_tokens=1, prompt_logprobs=NUM_TOP)
    token_ids = tokenizer.encode(prompts[1])
    scores = choices[1]["logprobs"]["token_logprobs"]
    assert len(longer["logprobs"]["tokens"]) == len(token_ids) + 1
    assert longer["logprobs"]["token_logprobs"][:-1] == scores
    assert longer["prompt_logprobs"][0] is None
    by_id = longer["prompt_logprobs"][1:]
    assert [at[str(i)]["logprob"] for i, at in zip(token_ids[1:], by_id, strict=True)] == scores[1:]
    assert all(sum(entry["rank"] is not None for entry in at.values()) == NUM_TOP for at in by_id)


def test_a_model_with_sliding_windows_scores_prompts_as_transformers_does(cramped_gemma3: Cramped) -> None:
    """Prompts of many steps, whose tokens see the last seven only in most layers."""
    prompts = [text[:length] for text, length in zip(humaneval_prompts(), (200, 1, 2, 17, 90), strict=False)]
    choices = score(cramped_gemma3.server.url, prompts)
    for prompt, choice in zip(prompts, choices, strict=True):
        assert_scores(cramped_gemma3.oracle, cramped_gemma3.tokenizer, prompt, choice)
