"""Greedy answers with edited logits are those of transformers, whose processors of the same names are the oracle."""

import pytest
import torch
import transformers

from kernels.attention.backend import select_backend
from kernels.model_ops.torch_ops import TorchOps
from models.loader import load_model
from models.runner import ModelRunner
from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec
from scheduler.output import KnownRow, NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams
from tests.models.tiny_models import build, save

CPU = torch.device("cpu")
EOS = 2
PROMPT = (5, 9, 60, 9, 31, 5, 140)
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def oracle():
    return build("llama")


@pytest.fixture(scope="module")
def runner(oracle, tmp_path_factory):
    path = save(oracle, tmp_path_factory.mktemp("model"))
    model = load_model(path, torch.float32, CPU, TorchOps(), lambda done, total: None)
    cache = KVCache(KVCacheSpec(3, 2, 16, 16, "float32"), 4, CPU)
    return ModelRunner(model, select_backend("torch", CPU), cache, max_num_seqs=1, max_model_len=64)


def answer(runner: ModelRunner, params: SamplingParams) -> list[int]:
    """Token by token, up to the first end token."""
    row = NewRow(0, 0, PROMPT, len(PROMPT), params, (0, 1, 2, 3), 0, len(PROMPT))
    generated: list[int] = []
    while len(generated) < NUM_TOKENS and EOS not in generated:
        [result] = runner.execute(SchedulerOutput((row,))).rows
        generated += result.token_ids
        row = KnownRow(0, (), None, len(PROMPT) + len(generated) - 1, 1, result.token_ids)
    runner.execute(SchedulerOutput((), finished_seq_ids=(0,)))
    return generated


CASES = [
    ({}, {}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    ({"logit_bias": ((EOS, 9.0),), "min_tokens": 7}, {"sequence_bias": [[[EOS], 9.0]], "min_new_tokens": 7}),
    (
        {"logit_bias": ((50, 8.0), (60, 8.0), (70, 8.0)), "repetition_penalty": 1.5, "bad_words": ((60,), (70, 70))},
        {
            "sequence_bias": [[[50], 8.0], [[60], 8.0], [[70], 8.0]],
            "repetition_penalty": 1.5,
            "bad_words_ids": [[60], [70, 70]],
        },
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), CASES, ids=[" ".join(ours) or "plain" for ours, _ in CASES])
@torch.inference_mode()
def test_greedy_answers_are_those_of_transformers(oracle, runner, ours, theirs):
    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=EOS, pad_token_id=0, use_cache=False, **theirs
    )
    expected = oracle.generate(torch.tensor([PROMPT]), config)[0, len(PROMPT) :].tolist()
    assert answer(runner, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, **ours)) == expected
    assert len(set(expected)) > 1
