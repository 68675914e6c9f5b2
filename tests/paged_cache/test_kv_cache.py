"""The device tensors: their size, and whole-block copies in every layer."""

import pytest
import torch

from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 9


def make_cache() -> tuple[KVCache, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A cache of random numbers, and a copy of them."""
    cache = KVCache(SPEC, NUM_BLOCKS, torch.device("cpu"))
    for layer in cache.layers:
        layer.key.normal_()
        layer.value.normal_()
    return cache, [(layer.key.clone(), layer.value.clone()) for layer in cache.layers]


def test_the_tensors_take_the_bytes_that_the_spec_computes():
    cache, _ = make_cache()
    num_bytes = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.key, layer.value))
    assert num_bytes == NUM_BLOCKS * SPEC.bytes_per_block
    assert cache.layers[0].key.shape == (NUM_BLOCKS, 2, 4, 8)
    assert cache.layers[0].block_size == 4


@pytest.mark.parametrize(
    "pairs",
    [[(2, 5)], [(0, 8), (0, 3), (7, 1)], [(5, 8), (7, 5)], [(7, 5), (5, 8)]],
    ids=["one", "several", "a source is written later", "a source is written first"],
)
def test_copies_read_every_source_as_it_was(pairs):
    cache, before = make_cache()
    cache.copy_blocks(torch.tensor(pairs))
    for layer, (key, value) in zip(cache.layers, before, strict=True):
        for src, dst in pairs:
            assert torch.equal(layer.key[dst], key[src])
            assert torch.equal(layer.value[dst], value[src])
        untouched = [i for i in range(NUM_BLOCKS) if i not in [dst for _, dst in pairs]]
        assert torch.equal(layer.key[untouched], key[untouched])
        assert torch.equal(layer.value[untouched], value[untouched])
