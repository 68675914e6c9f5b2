"""The engine's own small duties; its steps are tested through its process and through HTTP."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.attention.backend import BackendUnavailableError
from kernels.cpu import native_library
from paged_cache.spec import KVCacheSpec
from scheduler.stats import SchedulerStats
from server.config import load_settings
from server.engine import Engine, build_engine
from server.engine_sizing import UnservableSettings, fill_in_for, num_host_kv_blocks


def failing_check():
    raise AssertionError("block 3 counts 1 references, 0 block tables hold it")


def test_a_pool_that_is_not_whole_is_reported_and_counted_and_serving_goes_on(caplog):
    stats = SchedulerStats(*[0] * len(SchedulerStats.__struct_fields__))
    engine = Engine(SimpleNamespace(check_integrity=failing_check, stats=stats), runner=None, info=None)
    with caplog.at_level(logging.ERROR):
        engine.check_integrity()
    assert engine.stats.num_integrity_failures == 1
    assert "block 3 counts 1 references" in caplog.text


def build(**flags):
    """Build an engine on a model that is not there: the settings are looked at first."""
    return build_engine(load_settings(flags).engine_config(Path("/nonexistent")), lambda *progress: None)


@pytest.mark.parametrize("attention_backend", ["auto", "cpu"])
def test_batch_invariance_needs_the_native_library(attention_backend, monkeypatch, tmp_path):
    monkeypatch.setattr(native_library, "LIBRARY_PATH", tmp_path / "_paged_attention.so")
    monkeypatch.setattr("kernels.attention.cpu.load_library", native_library.load_library.__wrapped__)
    with pytest.raises(BackendUnavailableError, match=r"not built .* Install a C\+\+ compiler"):
        build(device="cpu", batch_invariant="true", attention_backend=attention_backend)


@pytest.mark.parametrize("attention_backend", ["torch", "reference"])
def test_plain_torch_is_not_batch_invariant(attention_backend):
    with pytest.raises(BackendUnavailableError, match=f"the {attention_backend} attention backend is not batch-inv"):
        build(device="cpu", batch_invariant="true", attention_backend=attention_backend)


def filled_in(device, **flags):
    return fill_in_for(torch.device(device), load_settings(flags).engine_config(Path("/m")))


def test_what_is_left_to_the_device(monkeypatch):
    monkeypatch.setattr("server.engine_sizing.available_host_bytes", lambda: 100 << 30)
    on_cpu, on_gpu = filled_in("cpu"), filled_in("cuda")
    assert (on_cpu.swap_space, on_gpu.swap_space) == (0, 4 << 30)
    assert on_gpu.long_prefill_token_threshold * 4 == on_gpu.max_num_batched_tokens
    chosen = filled_in("cpu", swap_space="1", long_prefill_token_threshold="0", max_num_batched_tokens="100")
    assert (chosen.swap_space, chosen.long_prefill_token_threshold) == (1 << 30, 0)
    monkeypatch.setattr("server.engine_sizing.available_host_bytes", lambda: 4 << 30)
    assert filled_in("cuda").swap_space == 1 << 30  # no start fails for want of what nobody asked for


def test_host_blocks_are_as_many_as_fit_the_swap_space(monkeypatch):
    spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    assert num_host_kv_blocks(filled_in("cpu"), spec) == 0
    monkeypatch.setattr("server.engine_sizing.available_host_bytes", lambda: 1 << 20)
    config = filled_in("cpu", swap_space=str(spec.bytes_per_block * 5 + 1))
    assert num_host_kv_blocks(config, spec) == 5
    with pytest.raises(UnservableSettings, match="--swap-space"):
        num_host_kv_blocks(filled_in("cpu", swap_space="1"), spec)


def test_a_swap_space_that_holds_not_one_block_is_refused():
    """2000 is more than the bare numbers that count as GiB: it would have been of no effect, and nobody told."""
    spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    with pytest.raises(UnservableSettings, match=f"--swap-space takes 2000 bytes.* needs {spec.bytes_per_block}"):
        num_host_kv_blocks(filled_in("cpu", swap_space="2000"), spec)
