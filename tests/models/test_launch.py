"""Launching a step reads nothing back from the device, so that it may run ahead of it."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.sampling.sampling_batch import SamplingBatch
from models.runner import ModelRunner
from paged_cache.kv_cache import KVCache
from paged_cache.manager import BlockManager
from paged_cache.spec import KVCacheSpec
from scheduler.config import SchedulerConfig
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

    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        self.table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        self.ops = SimpleNamespace(sample=self._sample)

    def __call__(self, batch, backend, kv_layers):
        return self.table[batch.input_ids]

    def logits(self, hidden):
        return hidden

    def _sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return (logits + batch.uniform[:, None]).argmax(dim=-1)


@pytest.fixture
def host_reads_refused(monkeypatch):
    """Methods that copy a tensor to the host without an operation that could be seen."""

    def refuse(*_):
        raise AssertionError("the launch reads a tensor back")

    def guard():
        for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, refuse)

    yield guard, monkeypatch.undo


def test_launch_reads_nothing_back(host_reads_refused):
    guard, lift = host_reads_refused
    limits = {"max_num_seqs": 4, "max_model_len": 48}
    scheduler = Scheduler(SchedulerConfig(**limits, max_num_batched_tokens=9), BlockManager(14, 4))
    runner = ModelRunner(LookedUpModel(), None, KVCache(KVCacheSpec(1, 1, 2, 4, "float32"), 14, CPU), **limits)
    for i in range(4):
        params = SamplingParams(max_tokens=12, n=1 + i % 2, seed=i, logprobs=(None, 2)[i // 2], prompt_logprobs=1)
        scheduler.add(Request(f"r{i}", tuple(range(i, i + 5 + 2 * i)), params, float(i)))
    copies = num_tokens = 0
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        copies += len(output.block_copies)
        guard()
        with ReadsNothingBack():
            pending = runner.launch(output)
        lift()
        num_tokens += sum(len(update.token_ids) for update in scheduler.update(output, pending.result()))
    assert num_tokens == 6 * 12
    assert copies > 0
    assert scheduler.stats.num_preemptions > 0
