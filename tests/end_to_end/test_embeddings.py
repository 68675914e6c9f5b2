"""`/v1/embeddings` gives the hidden states that transformers computes on the same float32 weights, pooled."""

import math

import openai
import torch

from tests.data_files import humaneval_prompts, mixed_prompts
from tests.end_to_end.conftest import Cramped
from tests.end_to_end.server_process import ServerProcess, wait_until
from tests.server import real_tokenizers

TOLERANCE = 1e-4  # of a coordinate, where the vector has length 1


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@torch.inference_mode()
def expected(oracle: torch.nn.Module, token_ids: list[int]) -> dict[str, torch.Tensor]:
    """By pooling: [hidden_size], at length 1."""
    states = oracle.model(input_ids=torch.tensor([token_ids])).last_hidden_state[0].double()
    return {name: vector / vector.norm() for name, vector in (("mean", states.mean(0)), ("last", states[-1]))}


def assert_near(values: list[float], vector: torch.Tensor) -> None:
    assert (torch.tensor(values, dtype=torch.float64) - vector).abs().max() < TOLERANCE


def test_smollm2_embeds_as_transformers_does(smollm2: ServerProcess, smollm2_reference) -> None:
    tokenizer = real_tokenizers.smollm2()
    texts = ["\n\n".join(humaneval_prompts()[:5]), *mixed_prompts()[8::16], "A"]
    token_ids = [tokenizer.encode(text) for text in texts]
    assert len(token_ids[0]) > 512  # two steps
    wanted = [expected(smollm2_reference, ids) for ids in token_ids]
    with client_of(smollm2) as client:
        for pooling in ("mean", "last"):
            answer = client.embeddings.create(model="smollm2", input=texts, extra_body={"pooling": pooling})
            assert answer.usage.prompt_tokens == sum(map(len, token_ids))
            for item, vectors in zip(answer.data, wanted, strict=True):
                assert_near(item.embedding, vectors[pooling])
            as_it_is = {"pooling": pooling, "normalize": False}
            item = client.embeddings.create(model="smollm2", input=token_ids[1:2], extra_body=as_it_is).data[0]
            length = math.hypot(*item.embedding)
            assert length > 2
            assert_near([value / length for value in item.embedding], wanted[1][pooling])


def test_texts_that_mean_the_same_are_closer(smollm2: ServerProcess) -> None:
    texts = ["The cat sleeps on the sofa.", "A kitten is napping on the couch.", "def add(a, b):\n    return a + b"]
    with client_of(smollm2) as client:
        vectors = [item.embedding for item in client.embeddings.create(model="smollm2", input=texts).data]
    cat, kitten, code = torch.tensor(vectors)
    assert cat @ kitten > cat @ code + 0.05


def test_chunks_and_other_requests_change_nothing(cramped_gemma3: Cramped) -> None:
    """Prompts of many steps, beside answers for which the pool is too small."""
    server = cramped_gemma3.server
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 211, (length,), generator=generator).tolist() for length in (60, 1, 33, 200)]
    with client_of(server) as client:
        generating = {"n": 4, "max_tokens": 150, "stream": True, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(model="tested", prompt=[5] * 16, **generating)
        answers = {
            pooling: client.embeddings.create(model="tested", input=prompts, extra_body={"pooling": pooling})
            for pooling in ("mean", "last")
        }
        assert sum(1 for _ in stream) > 0
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        assert server.metric("vllm:num_preemptions_total") > 0
    for pooling, answer in answers.items():
        for prompt, item in zip(prompts, answer.data, strict=True):
            assert_near(item.embedding, expected(cramped_gemma3.oracle, prompt)[pooling])
