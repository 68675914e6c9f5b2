"""The engine's own small duties; its steps are tested through its process and through HTTP."""

import logging
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.attention.backend import BackendUnavailableError
from kernels.cpu import native_library
from scheduler.stats import SchedulerStats
from server.config import load_settings
from server.engine import Engine, build_engine
from server.engine_sizing import UnservableSettings
from tests.kernels.conftest import make_backend


def failing_check():
    raise AssertionError("block 3 counts 1 references, 0 block tables hold it")


def test_a_pool_that_is_not_whole_is_reported_and_counted_and_serving_goes_on(caplog):
    stats = SchedulerStats(*[0] * len(fields(SchedulerStats)))
    engine = Engine(SimpleNamespace(check_integrity=failing_check, stats=stats), runner=None, info=None)
    with caplog.at_level(logging.ERROR):
        engine.check_integrity()
    assert engine.stats.num_integrity_failures == 1
    assert "block 3 counts 1 references" in caplog.text


def build(**flags):
    """Build an engine on a model that is not there: the settings are looked at first."""
    return build_engine(load_settings(flags).engine_config(Path("/nonexistent")), lambda *progress: None)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("attention_backend", ["auto", "cpu"])
def test_a_quantised_cache_is_refused_where_the_native_cpu_kernels_run(kv_cache_dtype, attention_backend):
    make_backend("cpu")
    with pytest.raises(UnservableSettings, match=rf"--kv-cache-dtype {kv_cache_dtype} needs --attention-backend torch"):
        build(device="cpu", kv_cache_dtype=kv_cache_dtype, attention_backend=attention_backend)


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
