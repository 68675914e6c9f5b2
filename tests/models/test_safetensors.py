"""Hugging Face directories that do not hold together: each problem is named before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import CheckpointError, UnsupportedModelError
from tests.models.test_families import load
from tests.models.tiny_models import build, save

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(build("llama"), tmp_path)


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite the tensors of the one file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_every_missing_surplus_and_misshapen_tensor_is_named(directory: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.3.input_layernorm.weight"] = torch.ones(64)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
        tensors["model.norm.weight"] = torch.ones(63)
        tensors["model.embed_tokens.weight"] = torch.ones(64, 211)

    edit(directory, change)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    problems = str(error.value).split(" does not fit its configuration: ")[1].split("; ")
    assert sorted(problems[:2]) == ["missing tensor lm_head.weight", "missing tensor model.layers.1.mlp.up_proj.weight"]
    assert sorted(problems[2:4]) == [
        "surplus tensor model.layers.0.self_attn.q_proj.bias",
        "surplus tensor model.layers.3.input_layernorm.weight",
    ]
    text = str(error.value)
    assert "tensor model.norm.weight has the shape [63]; expected [64]" in text
    assert "tensor model.embed_tokens.weight has the shape [64, 211]; expected [211, 64]" in text


def test_rotary_buffers_of_old_checkpoints_are_no_weights(directory: Path) -> None:
    edit(directory, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(directory)
    edit(directory, lambda tensors: tensors.update({"model.layers.0.self_attn.inv_freq_other": torch.ones(8)}))
    with pytest.raises(CheckpointError, match="inv_freq_other"):
        load(directory)


def test_a_mistaken_size_costs_a_message_and_no_memory(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] = 10**13
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has the shape \[211, 64\]; expected \[10000000000000,"):
        load(directory)


@pytest.mark.parametrize("size", [0, 5, 100, 4000, -8])
def test_a_truncated_file_is_named(size: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        load(directory)


def test_pickle_files_are_refused(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pickle files.*only safetensors and GGUF"):
        load(directory)
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has no \.safetensors file"):
        load(directory)


def test_integer_weights_are_refused(directory: Path) -> None:
    edit(directory, lambda tensors: tensors.update({"lm_head.weight": torch.ones(211, 64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight is of type I8; supported are F64, F32"):
        load(directory)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_float_type_is_converted(dtype: torch.dtype, directory: Path) -> None:
    edit(directory, lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    decoder = load(directory)
    want = load_file(directory / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].float()
    assert torch.equal(decoder.layers[1].mlp.gate_up.weight[96:], want)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    directory = save(build("llama"), tmp_path, max_shard_size="60KB")
    original = (directory / INDEX).read_text()
    shard = next(iter(json.loads(original)["weight_map"].values()))
    edit_index(directory, lambda names: names.update({"model.extra": shard}))
    with pytest.raises(CheckpointError, match=r"lists model\.extra in .*, which does not hold it"):
        load(directory)
    (directory / INDEX).write_text(original)
    edit_index(directory, lambda names: names.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"holds model\.norm\.weight, which .* does not list there"):
        load(directory)
    for file in ("../model.safetensors", "/etc/passwd", "pytorch_model.bin", "", 3):
        edit_index(directory, lambda names, file=file: names.update({"model.norm.weight": file}))
        with pytest.raises(CheckpointError, match=r"expected a \.safetensors file name"):
            load(directory)
    (directory / INDEX).write_text(original)
    (directory / shard).unlink()
    with pytest.raises(CheckpointError, match=f"lists {shard}, which is not there"):
        load(directory)


def test_a_tensor_in_two_files_is_named(directory: Path) -> None:
    save_file({"lm_head.weight": torch.ones(211, 64)}, directory / "model-extra.safetensors")
    with pytest.raises(CheckpointError, match=r"holds lm_head\.weight in two files"):
        load(directory)
