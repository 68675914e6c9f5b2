"""Every family against transformers on the same random weights, through paged blocks, however a prompt is cut."""

import random
from pathlib import Path

import pytest
import torch

from kernels.attention.metadata import AttentionParams
from kernels.model_ops.torch_ops import TorchOps
from models.config import LayerConfig, ModelConfig, RopeParams
from models.decoder import Decoder
from models.loader import load_model
from tests.models.paged import run_paged
from tests.models.tiny_models import BUILDERS, build, oracle_logits, save

CPU = torch.device("cpu")
# Prompts longer than every sliding window and than the original context of the scaled ropes.
_RNG = random.Random(3)
PROMPTS = [[_RNG.randrange(3, 211) for _ in range(length)] for length in (41, 1, 17, 64)]


def load(path: Path, dtype: torch.dtype = torch.float32):
    return load_model(path, dtype, CPU, TorchOps(), lambda done, total: None)


@pytest.mark.parametrize("name", BUILDERS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    expected = [oracle_logits(model, prompt) for prompt in PROMPTS]
    assert expected[0].std() > 0.1  # not a comparison of zeros
    decoder = load(save(model, tmp_path))
    for chunk_sizes in ([10_000], [7, 3, 1, 16], [1]):  # whole, mixed chunks and decodes, token by token
        for got, want in zip(run_paged(decoder, PROMPTS, chunk_sizes), expected, strict=True):
            assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "gemma3"])
def test_shards_load_as_one_file_does(name: str, tmp_path: Path) -> None:
    model = build(name)
    whole = load(save(model, tmp_path / "whole"))
    shards = save(model, tmp_path / "shards", max_shard_size="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    sharded = load(shards)
    (shards / "model.safetensors.index.json").unlink()
    unindexed = load(shards)
    for other in (sharded, unindexed):
        for (name_a, a), (name_b, b) in zip(whole.named_parameters(), other.named_parameters(), strict=True):
            assert name_a == name_b and torch.equal(a, b)


def test_a_stored_head_counts_though_the_configuration_ties_it(tmp_path: Path) -> None:
    model = build("llama")
    expected = oracle_logits(model, PROMPTS[0])
    save(model, tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    assert '"tie_word_embeddings": true' in (tmp_path / "config.json").read_text()
    (got,) = run_paged(load(tmp_path), PROMPTS[:1], [8])
    assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_half_precision_is_as_close_as_that_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(name)
    decoder = load(save(model, tmp_path), dtype)
    exact = oracle_logits(model, PROMPTS[0])
    half = oracle_logits(model.to(dtype), PROMPTS[0])
    (got,) = run_paged(decoder, PROMPTS[:1], [9])
    assert got.dtype == torch.float32
    assert (got - exact).abs().mean() < 1.5 * (half - exact).abs().mean()


def test_logits_of_chosen_rows_only(tmp_path: Path) -> None:
    decoder = load(save(build("gemma3"), tmp_path))
    hidden = torch.randn(5, decoder.config.hidden_size)
    chosen = torch.tensor([4, 1])
    torch.testing.assert_close(decoder.logits(hidden[chosen]), decoder.logits(hidden)[chosen])


def test_attention_is_told_of_scale_window_and_softcap() -> None:
    layers = (LayerConfig(RopeParams(10_000.0), 9), LayerConfig(RopeParams(10_000.0)))
    config = ModelConfig("gemma3", 9, 8, 8, 2, 1, 4, 64, layers, 1e-6, 0.3, (1,), attn_logit_softcap=50.0)
    decoder = Decoder(config, torch.float32, CPU, TorchOps())
    params = [layer.attention.params for layer in decoder.layers]
    assert params == [AttentionParams(0.3, 9, 50.0), AttentionParams(0.3, None, 50.0)]
