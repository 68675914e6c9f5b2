"""A whole model on the Triton path under the interpreter: requests through scheduler, runner, decoder and sampler.

The tokens must be those of the CPU backend, whatever mix of prefill and decode the steps are.
"""

import pytest
import torch

from kernels.attention.backend import select_backend
from kernels.model_ops.ops import ModelOps
from kernels.model_ops.torch_ops import TorchOps
from kernels.model_ops.triton_ops import TritonOps
from models.runner import ModelRunner
from paged_cache.kv_cache import KVCache
from paged_cache.manager import BlockManager
from paged_cache.spec import KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.models.decode_steps import EVERYTHING, SLIDING_WINDOW, toy_model

CPU = torch.device("cpu")
NUM_BLOCKS = 40
BLOCK_SIZE = 16
MAX_MODEL_LEN = 64
MAX_TOKENS = 4
# Chunks of prompts, beside decodes: the longest prompt takes three steps, and passes the window.
MAX_TOKENS_PER_STEP = 16
PROMPT_LENGTHS = (3, SLIDING_WINDOW + 8, 1)
SEEDED = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=3)


def generate(backend: str, ops: ModelOps, *, batch_invariant: bool, **settings: object) -> dict[str, list[int]]:
    """The tokens of every request."""
    model = toy_model(ops, CPU, **settings)
    config = model.config
    spec = KVCacheSpec(len(config.layers), config.num_kv_heads, config.head_dim, BLOCK_SIZE, "float32")
    limits = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=len(PROMPT_LENGTHS), max_num_batched_tokens=MAX_TOKENS_PER_STEP
    )
    scheduler = Scheduler(limits, BlockManager(NUM_BLOCKS, BLOCK_SIZE))
    runner = ModelRunner(
        model,
        select_backend(backend, CPU, batch_invariant=batch_invariant),
        KVCache(spec, NUM_BLOCKS, CPU),
        max_num_seqs=len(PROMPT_LENGTHS),
        max_model_len=MAX_MODEL_LEN,
    )
    generator = torch.Generator().manual_seed(9)
    for i, length in enumerate(PROMPT_LENGTHS):
        prompt = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
        params = SEEDED if i % 2 else SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        scheduler.add(Request(f"r{i}", tuple(prompt), params, 0.0))
    tokens: dict[str, list[int]] = {}
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        for update in scheduler.update(output, runner.execute(output)):
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
    return tokens


@pytest.mark.parametrize(
    ("settings", "batch_invariant"),
    [
        pytest.param({}, False, id="plain"),
        pytest.param(EVERYTHING, True, id="everything, batch-invariant"),
        pytest.param({}, True, id="plain, batch-invariant", marks=pytest.mark.full),
        pytest.param(EVERYTHING, False, id="everything", marks=pytest.mark.full),
    ],
)
def test_the_tokens_are_those_of_the_cpu_backend(settings: dict[str, object], batch_invariant: bool) -> None:
    expected = generate("cpu", TorchOps(), batch_invariant=False, **settings)
    actual = generate("triton", TritonOps(batch_invariant=batch_invariant), batch_invariant=batch_invariant, **settings)
    assert actual == expected
    assert {len(tokens) for tokens in expected.values()} <= set(range(1, MAX_TOKENS + 1))
