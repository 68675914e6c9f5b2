"""Greedy answers through HTTP equal transformers' on the same dequantised float32 weights, for every family: alone,
all at once, in chunks of 16 tokens, and in a pool so small that sequences are preempted."""

import pytest
import torch

from server.tokenizer import load_tokenizer
from tests.data_files import mixed_prompts
from tests.end_to_end.greedy import assert_greedy, complete
from tests.end_to_end.server_process import ServerProcess
from tests.end_to_end.tiny_tokenizer import save_tokenizer
from tests.models.real_models import gemma3_oracle
from tests.models.tiny_models import SIZES, build, save

NUM_PROMPTS = 24
FLAGS = ("--served-model-name", "tested", "--quantization", "none", "--max-num-seqs", str(NUM_PROMPTS))


def small_pool(prompts, max_tokens):
    """As many blocks as hold the longest sequence, and one more."""
    return str(1 + max(-(-(len(prompt) + max_tokens) // 16) for prompt in prompts))


def check_every_way(path, oracle, prompts, max_tokens, *flags, num_alone=NUM_PROMPTS):
    """Get the answers in every way, and check each against the oracle and all against one another.

    `num_alone` of the prompts are also answered alone, one after the other.
    """
    with ServerProcess(path, *FLAGS, *flags) as server:
        together = complete(server.url, prompts, at_once=len(prompts), max_tokens=max_tokens)
        alone = complete(server.url, prompts[:num_alone], at_once=1, max_tokens=max_tokens)
    cramped_flags = ("--max-num-batched-tokens", "16", "--num-gpu-blocks-override", small_pool(prompts, max_tokens))
    with ServerProcess(path, *FLAGS, *flags, *cramped_flags) as server:
        cramped = complete(server.url, prompts, at_once=len(prompts), max_tokens=max_tokens)
        assert server.metric("vllm:num_preemptions_total") > 0
    num_ties = num_different = 0
    for i, answers in enumerate(zip(together, cramped, strict=True)):
        # Equal tokens are read by the oracle once.
        different = {answer.token_ids: answer for answer in (*answers, *alone[i : i + 1])}
        num_different += len(different) > 1
        num_ties += sum(assert_greedy(oracle, answer) for answer in different.values())
        assert all(len(token_ids) == max_tokens for token_ids in different)
    print(f"{path}: {num_ties} tokens decided by a tie, {num_different} answers differ between the ways")
    assert num_ties or not num_different


def real_prompts(path):
    tokenizer = load_tokenizer(path)
    return [tuple(tokenizer.encode(text)[:96]) for text in mixed_prompts()[:NUM_PROMPTS]]


def test_smollm2(smollm2_path, smollm2_reference):
    check_every_way(smollm2_path, smollm2_reference, real_prompts(smollm2_path), 64)


def test_gemma3(gemma3_path):
    # Alone, each costs as much time as all at once: a few of the twenty-four keep the suite short.
    check_every_way(gemma3_path, gemma3_oracle(gemma3_path), real_prompts(gemma3_path), 64, num_alone=6)


@pytest.mark.parametrize("family", ["llama3_rope", "qwen2", "qwen3", "mistral_window", "gemma3"])
def test_tiny_models_of_each_family(family, tmp_path):
    oracle = build(family)
    save(oracle, tmp_path)
    save_tokenizer(tmp_path, SIZES["vocab_size"])
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 80, (NUM_PROMPTS,), generator=generator).tolist()
    prompts = [tuple(torch.randint(3, 211, (length,), generator=generator).tolist()) for length in lengths]
    check_every_way(tmp_path, oracle, prompts, 24, "--cpu-threads", "1")
