"""Launching a step reads nothing back from the device, so that it may run ahead of it; what comes back is exact."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.sampling.sampling_batch import SamplingBatch
from kernels.sampling.torch_sampler import token_logprobs
from models.runner import ModelRunner
from models.sampler import uniform_numbers
from paged_cache.kv_cache import KVCache
from paged_cache.manager import BlockManager
from paged_cache.spec import KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.output import GrammarMask, KnownRow, NewRow, SchedulerOutput
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

CPU = torch.device("cpu")
VOCAB_SIZE = 50
# Whatever returns a number to the host, or a shape that only the device knows.
WAITING_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2")


class ReadsNothingBack(TorchDispatchMode):
    """Refuses the operations that make the host wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in WAITING_OPERATIONS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


class LookedUpModel:
    """Logits that depend on the token alone; a table in the place of the layers."""

    device = CPU
    config = SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=(3,))

    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        self.table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        self.ops = SimpleNamespace(sample=self._sample, token_logprobs=token_logprobs)

    def __call__(self, batch, backend, kv_layers, wanted):
        return self.table[batch.input_ids]

    def logits(self, hidden):
        return hidden

    def _sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return (logits.argmax(dim=-1) + (batch.uniform * VOCAB_SIZE).long()) % VOCAB_SIZE

    def expected(self, prompt, params, index):
        """The tokens of a sequence and their log-probabilities, without a runner."""
        token_ids, scores = list(prompt), []
        for position in range(len(prompt), len(prompt) + params.max_tokens):
            logits = self.table[token_ids[-1]]
            [uniform] = uniform_numbers(*(np.array([number]) for number in (params.seed, index, position)))
            token_ids.append((int(logits.argmax()) + int(uniform * VOCAB_SIZE)) % VOCAB_SIZE)
            scores.append(float(logits.log_softmax(-1)[token_ids[-1]]))
        return token_ids[len(prompt) :], scores


@pytest.fixture
def host_reads_refused(monkeypatch):
    """Methods that copy a tensor to the host without an operation that could be seen."""

    def refuse(*_):
        raise AssertionError("the launch reads a tensor back")

    def guard():
        for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, refuse)

    yield guard, monkeypatch.undo


@pytest.mark.parametrize("num_host_blocks", [0, 20], ids=["recomputing", "swapping"])
def test_launch_reads_nothing_back(host_reads_refused, num_host_blocks):
    guard, lift = host_reads_refused
    limits = {"max_num_seqs": 6, "max_model_len": 48}
    scheduler = Scheduler(
        SchedulerConfig(**limits, max_num_batched_tokens=9, recompute_seconds_per_token=1.0),
        BlockManager(14, 4, num_host_blocks=num_host_blocks),
    )
    model = LookedUpModel()
    kv_cache = KVCache(KVCacheSpec(1, 1, 2, 4, "float32"), 14, CPU, num_host_blocks)
    runner = ModelRunner(model, None, kv_cache, **limits)
    requests = [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=tuple(range(i, i + 5 + 2 * i)),
            # Rows with scores and rows without share steps, and so do different numbers of best tokens.
            params=SamplingParams(max_tokens=12, n=1 + i % 2, seed=i, logprobs=(1, None, 2)[i % 3], prompt_logprobs=1),
            arrival_time=float(i),
        )
        for i in range(4)
    ]
    for request in requests:
        scheduler.add(request)
    copies, updates = 0, []
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        copies += len(output.block_copies)
        guard()
        with ReadsNothingBack():
            pending = runner.launch(output)
        lift()
        updates += scheduler.update(output, pending.result())
    assert copies > 0
    assert scheduler.stats.num_preemptions > 0
    assert (scheduler.stats.num_swapped_in_blocks > 0) == (num_host_blocks > 0)
    for request in requests:
        for index in range(request.params.n):
            own = [u for u in updates if (u.request_id, u.index) == (request.request_id, index)]
            token_ids, logprobs = model.expected(request.prompt_token_ids, request.params, index)
            assert [token_id for update in own for token_id in update.token_ids] == token_ids
            scores = [score for update in own for score in update.logprobs]
            if request.params.logprobs is None:
                assert not scores
                continue
            assert [score.token_id for score in scores] == token_ids
            assert [score.logprob for score in scores] == pytest.approx(logprobs, abs=1e-5)
            assert {len(score.top) for score in scores} == {request.params.logprobs}


def test_edits_and_pooling_read_nothing_back(host_reads_refused):
    """A step with every edit, a grammar, scores and an embedding; then the next one of the same sequences."""
    guard, lift = host_reads_refused
    limits = {"max_num_seqs": 4, "max_model_len": 48}
    runner = ModelRunner(LookedUpModel(), None, KVCache(KVCacheSpec(1, 1, 2, 4, "float32"), 14, CPU), **limits)
    edits = SamplingParams(
        max_tokens=5,
        logprobs=1,
        min_tokens=4,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        logit_bias=((4, 1.0),),
        bad_words=((1,), (2, 3)),
        allowed_token_ids=tuple(range(40)),
    )
    params = [edits, SamplingParams(max_tokens=5), SamplingParams(max_tokens=0, pooling="mean")]
    prompts = [(1, 2, 3), (4, 5), (6, 7, 8, 9)]
    rows = [NewRow(i, 0, prompt, len(prompt), params[i], (i,), 0, len(prompt)) for i, prompt in enumerate(prompts)]
    mask = GrammarMask(place=1, bitmask=(1 << 17).to_bytes(8, "little"))

    def launch(output):
        guard()
        with ReadsNothingBack():
            pending = runner.launch(output)
        lift()
        return pending.result().rows

    first = launch(SchedulerOutput(tuple(rows), grammar_masks=(mask,)))
    assert np.frombuffer(first[2].embedding, "<f4").shape == (VOCAB_SIZE,)
    known = (KnownRow(0, (), None, 3, 1, first[0].token_ids), KnownRow(1, (), None, 2, 1))
    second = launch(SchedulerOutput(known, finished_seq_ids=(2,), grammar_masks=(mask,)))
    for results in (first, second):
        assert len(results[0].logprobs) == 1 or results[0].is_dead_end
