"""All layers in one native call: bitwise what the single operations give, and bitwise the same in any company."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.attention.cpu import CpuBackend
from kernels.attention.metadata import AttentionMetadata
from kernels.cpu.native_library import load_library, supported_instruction_sets
from kernels.model_ops.native_ops import NativeOps
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from models.loader import load_model
from models.native_layers import native_layers
from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec
from tests.models.paged import run_paged
from tests.models.tiny_models import build, save

_RNG = random.Random(6)
# Steps of one row, of as many rows as are computed by every thread for itself, of more, and of several row tiles.
PROMPTS = [[_RNG.randrange(3, 211) for _ in range(length)] for length in (103, 1, 17, 41, 2)]
CHUNK_SIZES = ([10_000], [7, 3, 1, 16], [1])

# Biases; another head size; a norm of each head; windows, four norms, GELU, two rotary embeddings; a soft cap.
FAMILIES = ["llama_biases", "llama_head_dim", "qwen3", "gemma3", "gemma3_softcap"]
CACHE_DTYPES = [torch.float32, torch.bfloat16, torch.int8]

pytestmark = pytest.mark.usefixtures("native_library")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """More than one, and no divisor of the rows."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(num_threads)


def load(path: Path, instruction_set: str | None = None) -> Decoder:
    ops = NativeOps(instruction_set)
    return load_model(path, torch.float32, torch.device("cpu"), ops, lambda done, total: None, "int8")


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_equal_single_operations(family: str, tmp_path: Path) -> None:
    save(build(family), tmp_path)
    for instruction_set in supported_instruction_sets(load_library()):
        decoder, backend = load(tmp_path, instruction_set), CpuBackend(instruction_set)
        native = decoder.native_layers
        assert native is not None
        got = [run_paged(decoder, PROMPTS, chunks, backend=backend) for chunks in CHUNK_SIZES]
        decoder.native_layers = None
        expected = run_paged(decoder, PROMPTS, CHUNK_SIZES[1], backend=backend)
        for together in got:
            assert all(torch.equal(a, b) for a, b in zip(together, expected, strict=True))


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_logits_do_not_depend_on_company(cache_dtype: torch.dtype, tmp_path: Path) -> None:
    decoder = load(save(build("gemma3"), tmp_path))
    backend = CpuBackend()
    torch.set_num_threads(1)
    alone = [run_paged(decoder, [p], [10_000], backend=backend, cache_dtype=cache_dtype)[0] for p in PROMPTS]
    assert all(logits.isfinite().all() for logits in alone)
    torch.set_num_threads(3)
    for chunk_sizes in CHUNK_SIZES:
        together = run_paged(decoder, PROMPTS, chunk_sizes, backend=backend, cache_dtype=cache_dtype)
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("length", [3, 50])
def test_only_wanted_hidden_states(length: int, tmp_path: Path) -> None:
    """Those that are asked for are the same, and so is what is written."""
    decoder = load(save(build("gemma3"), tmp_path))
    caches = [_cache(decoder, 20) for _ in range(3)]
    batch = _one_prompt(length)
    expected = decoder(batch, CpuBackend(), caches[0].layers)
    wanted = torch.tensor([1, length - 1])
    hidden = decoder(batch, CpuBackend(), caches[1].layers, wanted)
    assert torch.equal(hidden[wanted], expected[wanted])
    decoder(batch, CpuBackend(), caches[2].layers, torch.empty(0, dtype=torch.int64))
    for layer, *others in zip(*(cache.layers for cache in caches), strict=True):
        assert layer.key.any()
        assert all(torch.equal(layer.key, o.key) and torch.equal(layer.value, o.value) for o in others)


def test_windows_that_differ(tmp_path: Path) -> None:
    """Not in one call, which would attend in the second window to the keys of the first."""
    decoder = load(save(build("gemma3"), tmp_path))
    attention = decoder.layers[1].attention
    attention.params = dataclasses.replace(attention.params, sliding_window=400)
    assert decoder.native_layers is not None and native_layers(decoder) is None


def test_logits_are_near_those_of_float32(tmp_path: Path) -> None:
    """Rounding to 8 bits moves logits by a few hundredths of their spread; a wrong operation by far more."""
    path = save(build("llama"), tmp_path)
    ops = NativeOps()
    exact = load_model(path, torch.float32, torch.device("cpu"), ops, lambda done, total: None)
    assert exact.native_layers is None
    (expected,) = run_paged(exact, PROMPTS[:1], [10_000], backend=CpuBackend())
    (got,) = run_paged(load(path), PROMPTS[:1], [10_000], backend=CpuBackend())
    assert not torch.equal(got, expected)
    assert (got - expected).std() < 0.05 * expected.std()


def test_parts_are_timed(tmp_path: Path) -> None:
    decoder = load(save(build("llama"), tmp_path))
    native = decoder.native_layers
    assert native is not None
    run_paged(decoder, PROMPTS[:1], [10_000], backend=CpuBackend())  # nothing is measured before it is asked for
    native.measure()
    run_paged(decoder, PROMPTS[:1], [10_000], backend=CpuBackend())
    seconds = native.part_seconds()
    assert seconds["products"] > 0 and seconds["attention"] > 0
    run_paged(decoder, PROMPTS[:1], [10_000], backend=CpuBackend())
    assert all(later > seconds[part] for part, later in native.part_seconds().items())


@pytest.mark.parametrize(
    ("slot", "block", "message"), [(99, 0, "names a slot outside"), (0, 2, "names a block outside")]
)
def test_metadata_that_do_not_fit_the_cache(slot: int, block: int, message: str, tmp_path: Path) -> None:
    """Refused before anything is written."""
    decoder = load(save(build("llama"), tmp_path))
    cache = _cache(decoder, 2)
    with pytest.raises(ValueError, match=message):
        decoder(_one_prompt(1, slot, block), CpuBackend(), cache.layers)
    assert not any(layer.key.any() or layer.value.any() for layer in cache.layers)


def _cache(decoder: Decoder, num_blocks: int) -> KVCache:
    config = decoder.config
    spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size=4, dtype="float32")
    return KVCache(spec, num_blocks, torch.device("cpu"))


def _one_prompt(length: int, slot: int = 0, block: int = 0) -> ForwardBatch:
    """A prompt whose first token goes to `slot`, and whose blocks are numbered from `block` on."""
    starts, lengths = np.array([0, length], np.int32), np.array([length], np.int32)
    metadata = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lengths),
        block_tables=torch.arange(block, block + -(-length // 4), dtype=torch.int32)[None],
        slot_mapping=torch.arange(slot, slot + length),
        host_query_start_loc=starts,
        host_seq_lens=lengths,
    )
    positions = torch.arange(length)
    return ForwardBatch(positions % 200 + 3, positions, positions[-1:], metadata)
