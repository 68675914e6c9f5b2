"""Beam searches through HTTP on the default model: transformers' answers, in its order, with its scores."""

import asyncio

import httpx
import pytest
import torch
import transformers

from tests.data_files import humaneval_prompts
from tests.end_to_end.server_process import ServerProcess
from tests.server import real_tokenizers

MAX_TOKENS = 12
# A question that is answered in a word ends by itself, a story at its length.
QUESTIONS = ["What is the capital of France? Answer with one word.", "Tell me a story about a fox."]
SEARCHES = [
    {"n": 4},
    {"n": 2, "beam_width": 3, "length_penalty": 0.0, "early_stopping": True},
    {"n": 3, "beam_width": 5, "length_penalty": 2.0},
]


def ask(url: str, asked: list[tuple[str, dict]]) -> list[dict]:
    """The answers to bodies that are sent at the same time."""

    async def run() -> list[dict]:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            common = {"use_beam_search": True, "max_tokens": MAX_TOKENS, "return_token_ids": True}
            responses = await asyncio.gather(*(client.post(path, json={**body, **common}) for path, body in asked))
        assert all(response.status_code == 200 for response in responses), responses[0].text
        return [response.json() for response in responses]

    return asyncio.run(run())


@torch.inference_mode()
def expected(oracle: torch.nn.Module, prompt: list[int], search: dict) -> list[tuple[list[int], float]]:
    """The answers of transformers, best first, each with its score."""
    eos_token_ids = list(real_tokenizers.smollm2().eos_token_ids)
    config = transformers.GenerationConfig(
        num_beams=search.get("beam_width", search["n"]),
        num_return_sequences=search["n"],
        length_penalty=search.get("length_penalty", 1.0),
        early_stopping=search.get("early_stopping", False),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=eos_token_ids,
        pad_token_id=eos_token_ids[0],
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = oracle.generate(torch.tensor([prompt]), config)
    answers = []
    for ids, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token_id in enumerate(ids) if token_id in eos_token_ids), len(ids))
        answers.append((ids[:end], score))
    return answers


def test_answers_are_those_of_transformers(smollm2: ServerProcess, smollm2_reference):
    chat, completions = "/v1/chat/completions", "/v1/completions"
    chats = [{"messages": [{"role": "user", "content": question}], "logprobs": True} for question in QUESTIONS]
    bodies = [(chat, body) for body in chats] + [(completions, {"prompt": humaneval_prompts()[1], "logprobs": 0})]
    asked = [(path, {**body, **search}) for (path, body), search in zip(bodies, SEARCHES, strict=True)]
    reasons = set()
    for (path, body), answer in zip(asked, ask(smollm2.url, asked), strict=True):
        prompt = answer["prompt_token_ids"] if path == chat else answer["choices"][0]["prompt_token_ids"]
        answers = expected(smollm2_reference, prompt, body)
        assert [choice["token_ids"] for choice in answer["choices"]] == [ids for ids, _ in answers]
        for choice, (ids, score) in zip(answer["choices"], answers, strict=True):
            logprobs = choice["logprobs"]
            of_tokens = (
                logprobs["token_logprobs"] if path == completions else [c["logprob"] for c in logprobs["content"]]
            )
            if choice["finish_reason"] == "length":  # else the end token's is not shown
                total = sum(of_tokens)
                assert total / len(ids) ** body.get("length_penalty", 1.0) == pytest.approx(score, abs=1e-4)
            reasons.add(choice["finish_reason"])
        assert answer["usage"]["completion_tokens"] == sum(len(ids) for ids, _ in answers)
    assert reasons == {"stop", "length"}


def test_a_stop_string_cuts_the_answers(smollm2: ServerProcess):
    body = {"messages": [{"role": "user", "content": QUESTIONS[1]}], "n": 3}
    path = "/v1/chat/completions"
    whole, cut = ask(smollm2.url, [(path, body), (path, {**body, "stop": [" a "]})])
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert any(" a " in text for text in texts)
    assert [choice["message"]["content"] for choice in cut["choices"]] == [text.split(" a ")[0] for text in texts]
