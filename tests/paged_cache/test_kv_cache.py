"""The device tensors: their size, and whole-block copies in every layer."""

import dataclasses

import pytest
import torch

from kernels.attention.metadata import KVLayer
from paged_cache import kv_cache
from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 9


def tensors_of(layer: KVLayer) -> list[torch.Tensor]:
    """Every tensor of a layer as bytes, [num_blocks, ...]."""
    tensors = [getattr(layer, field.name) for field in dataclasses.fields(layer)]
    return [tensor.view(torch.uint8) for tensor in tensors if tensor is not None]


def make_cache(spec: KVCacheSpec = SPEC) -> tuple[KVCache, list[list[torch.Tensor]]]:
    """A cache of random bytes, and a copy of them."""
    cache = KVCache(spec, NUM_BLOCKS, torch.device("cpu"))
    for layer in cache.layers:
        for tensor in tensors_of(layer):
            tensor.random_(0, 256)
    return cache, [[tensor.clone() for tensor in tensors_of(layer)] for layer in cache.layers]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_the_tensors_take_the_bytes_that_the_spec_computes(dtype):
    cache, _ = make_cache(dataclasses.replace(SPEC, dtype=dtype))
    num_bytes = sum(tensor.numel() for layer in cache.layers for tensor in tensors_of(layer))
    assert num_bytes == NUM_BLOCKS * cache.spec.bytes_per_block
    assert cache.layers[0].key.shape == (NUM_BLOCKS, 2, 4, 8)
    assert cache.layers[0].block_size == 4


PAIRS = {
    "one": [(2, 5)],
    "several": [(0, 8), (0, 3), (7, 1)],
    "a source is written later": [(5, 8), (7, 5)],
    "a source is written first": [(7, 5), (5, 8)],
    "an exchange": [(1, 2), (2, 1)],
}


def assert_copied(cache: KVCache, before: list[list[torch.Tensor]], pairs: list[tuple[int, int]]) -> None:
    """Every destination holds what its source held before, and nothing else has changed."""
    for layer, tensors in zip(cache.layers, before, strict=True):
        for now, then in zip(tensors_of(layer), tensors, strict=True):
            expected = then.clone()
            for src, dst in pairs:
                expected[dst] = then[src]
            assert torch.equal(now, expected)


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_copies_read_every_source_as_it_was(pairs, dtype):
    cache, before = make_cache(dataclasses.replace(SPEC, dtype=dtype))
    cache.copy_blocks(torch.tensor(pairs))
    assert_copied(cache, before, pairs)


@pytest.mark.parametrize("head_dim", [3, 8], ids=["words of 16 bits", "words of 64 bits"])
def test_copies_keep_to_their_memory_layer_by_layer(monkeypatch, head_dim):
    spec = dataclasses.replace(SPEC, dtype="int8", head_dim=head_dim, block_size=1, num_kv_heads=1)
    cache, before = make_cache(spec)
    # Three copies in one of the three layers take as much as one block in all: two layers fit at once.
    monkeypatch.setattr(kv_cache, "MAX_COPY_BYTES", 2 * spec.bytes_per_block)
    cache.copy_blocks(torch.tensor(PAIRS["several"]))
    assert_copied(cache, before, PAIRS["several"])


def test_no_copies_change_nothing():
    cache, before = make_cache()
    cache.copy_blocks(torch.zeros(0, 2, dtype=torch.int64))
    assert_copied(cache, before, [])
