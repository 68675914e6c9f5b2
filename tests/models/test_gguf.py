"""GGUF files: written by the gguf package in many types, the two real models, and damaged ones."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from kernels.model_ops.torch_ops import TorchOps
from models.config import LayerConfig, LinearScaling, RopeParams, YarnScaling
from models.config_reader import read_config
from models.errors import CheckpointError, ModelError, UnsupportedModelError
from models.gguf_file import GGUFFile
from models.loader import load_model
from tests.models.gguf_files import to_gguf
from tests.models.paged import run_paged
from tests.models.real_models import gemma3_oracle
from tests.models.test_families import CPU, PROMPTS, load
from tests.models.tiny_models import build, oracle_logits

TYPES = [Type.Q8_0, Type.Q4_0, Type.F16, Type.Q4_1, Type.BF16, Type.Q5_0, Type.F32, Type.Q5_1]
READABLE = [Type.F32, Type.F16, *gguf.quants._type_traits]


def _every_type(name: str) -> Type:
    """The matrices of a file in all types that the gguf package can write for rows of 64."""
    return TYPES[sum(name.encode()) % len(TYPES)]


# --- files made by the gguf package ---


@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "llama_biases", "qwen2", "qwen3", "gemma3", "gemma3_linear_rope"]
)
def test_logits_equal_transformers_on_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    model = build(name)
    if name.startswith("gemma3"):  # the file has no layer types; llama.cpp knows the pattern
        types = ["sliding_attention"] * 5 + ["full_attention"]
        config = model.config
        config.layer_types, config.num_hidden_layers, config.query_pre_attn_scalar = types, 6, config.head_dim
        torch.manual_seed(2)
        model = transformers.Gemma3ForCausalLM(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)

    def edit(writer: gguf.GGUFWriter) -> None:
        if name == "gemma3_linear_rope":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(8.0)

    decoder = load(to_gguf(model, tmp_path / "model.gguf", _every_type, edit))
    assert decoder.config.tie_word_embeddings == model.config.tie_word_embeddings
    for chunk_sizes in ([10_000], [5, 1]):
        for got, prompt in zip(run_paged(decoder, PROMPTS, chunk_sizes), PROMPTS, strict=True):
            assert (got - oracle_logits(model, prompt)).abs().max() < 1e-4


def test_the_factor_tensor_of_llama3_is_honoured(tmp_path: Path) -> None:
    model = build("llama3_rope")
    frequencies = model.model.rotary_emb.inv_freq
    head_dim = 2 * len(frequencies)
    plain = 500_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    factors = (plain / frequencies).numpy().astype(np.float32)
    assert factors.max() > 7
    path = to_gguf(model, tmp_path / "model.gguf", edit=lambda w: w.add_tensor("rope_freqs.weight", factors))
    (got,) = run_paged(load(path), [PROMPTS[3]], [16])
    assert (got - oracle_logits(model, PROMPTS[3])).abs().max() < 1e-4


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_pieces_equal_the_gguf_package_whatever_the_type(kind: Type, tmp_path: Path) -> None:
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    num_rows, num_columns = 40, 4 * block_values
    data = rng.integers(0, 60, (num_rows, num_columns // block_values * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("before", np.ones(3, dtype=np.float32))
    writer.add_tensor("one", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "one.gguf")
    assert file.tensors["one"].shape == (num_rows, num_columns)
    pieces = [values for _, values in file.pieces("one", 8)]
    np.testing.assert_array_equal(np.concatenate(pieces), gguf.quants.dequantize(data, kind))


def test_pieces_are_whole_groups_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.gguf_file._PIECE_VALUES", 100)
    model = build("llama_biases")
    decoder = load(to_gguf(model, tmp_path / "model.gguf", _every_type))
    file = GGUFFile(tmp_path / "model.gguf")
    starts = [start for start, _ in file.pieces("blk.0.attn_q.weight", 16)]
    assert starts == [0, 16, 32, 48]
    (got,) = run_paged(decoder, PROMPTS[:1], [8])
    assert (got - oracle_logits(model, PROMPTS[0])).abs().max() < 1e-4


def test_metadata_and_tensors_equal_those_of_the_gguf_package(smollm2_path: Path) -> None:
    ours, theirs = GGUFFile(smollm2_path), gguf.GGUFReader(smollm2_path)
    assert [(t.name, t.shape, t.type, t.offset, t.num_bytes) for t in ours.tensors.values()] == [
        (t.name, tuple(t.shape.tolist()[::-1]), t.tensor_type, t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for name, field in fields.items():
        value = ours.metadata[name]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), name


# --- configuration ---


def _config_with(tmp_path: Path, name: str = "llama", **keys: object):
    def edit(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            full = key.replace("__", ".")
            if not full.startswith("tokenizer."):
                full = f"{writer.arch}.{full}"
            if isinstance(value, str):
                writer.add_string(full, value)
            elif isinstance(value, float):
                writer.add_float32(full, value)
            elif isinstance(value, list):
                writer.add_array(full, value)
            else:
                writer.add_uint32(full, value)

    return read_config(to_gguf(build(name), tmp_path / "model.gguf", edit=edit))


def test_yarn_and_linear_scaling_keys(tmp_path: Path) -> None:
    linear = _config_with(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear.layers[0].rope.scaling == LinearScaling(4.0)
    yarn = _config_with(
        tmp_path, rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=64
    )
    scaling = yarn.layers[0].rope.scaling
    assert isinstance(scaling, YarnScaling) and scaling.original_max_position_embeddings == 64
    assert scaling.attention_factor == pytest.approx(1 + 0.1 * np.log(4))


def test_sliding_window_of_a_mistral_and_of_gemma(tmp_path: Path) -> None:
    assert _config_with(tmp_path, attention__sliding_window=9).layers == (LayerConfig(RopeParams(10_000.0), 9),) * 3
    windows = [layer.sliding_window for layer in _config_with(tmp_path, "gemma3").layers]
    assert windows == [7, 7, 7, 7]  # five local layers to one global, counted from the first


def test_tokens_that_end_a_turn_end_a_sequence(tmp_path: Path) -> None:
    config = _config_with(
        tmp_path,
        tokenizer__ggml__tokens=["a", "<|im_end|>", "<end_of_turn>", "b"],
        tokenizer__ggml__token_type=[1, 3, 1, 3],
        tokenizer__ggml__eot_token_id=3,
    )
    assert config.eos_token_ids == (2, 3, 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"rope__dimension_count": 8}, "rope.dimension_count is 8"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"attention__sliding_window": 0.5}, "sliding_window is 0.5"),
        ({"tokenizer__ggml__eot_token_id": "x"}, "eot_token_id is 'x'"),
    ],
)
def test_an_unsupported_key_is_named(keys: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        _config_with(tmp_path, **keys)


# --- files that do not hold together ---


def _with_tensors(tmp_path: Path, **extra: np.ndarray) -> Path:
    def edit(writer: gguf.GGUFWriter) -> None:
        for name, values in extra.items():
            writer.add_tensor(name, values)

    return to_gguf(build("llama_tied"), tmp_path / "model.gguf", edit=edit)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'mamba'; supported are llama, qwen2, qwen3, gemma3"):
        read_config(tmp_path / "model.gguf")


def test_surplus_and_missing_tensors_are_named(tmp_path: Path) -> None:
    path = _with_tensors(tmp_path, **{"blk.9.attn_q.weight": np.ones((64, 64), np.float32)})
    with pytest.raises(CheckpointError, match=r"surplus tensor blk\.9\.attn_q\.weight$"):
        load(path)
    data = path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        load(path)
    for problem in ("missing tensor blk.1.ffn_up.weight", "surplus tensor blk.1.ffn_xx.weight", "blk.9.attn_q.weight"):
        assert problem in str(error.value)


def test_wrong_shape_is_told_with_both_shapes(tmp_path: Path) -> None:
    path = _with_tensors(tmp_path, **{"output.weight": np.ones((100, 64), np.float32)})
    with pytest.raises(CheckpointError, match=r"output\.weight has the shape \[100, 64\]; expected \[211, 64\]"):
        load(path)


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    path = _with_tensors(tmp_path, **{"output.weight": np.ones((211, 64), np.int8)})
    with pytest.raises(UnsupportedModelError, match=r"output\.weight is of type I8"):
        load(path)


def test_split_files_are_refused(tmp_path: Path) -> None:
    path = to_gguf(build("llama"), tmp_path / "m.gguf", edit=lambda w: w.add_uint16("split.count", 3))
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        read_config(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = _with_tensors(tmp_path)
    whole = path.read_bytes()
    for size in (0, 3, 4, 11, 24, 100, 700, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"truncated|damaged|cannot be read|not a GGUF"):
            load(path)


def test_random_damage_to_the_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    path = _with_tensors(tmp_path)
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(5)
    for _ in range(150):
        damaged = whole.copy()
        damaged[int(rng.integers(0, 3000))] = int(rng.integers(0, 256))
        path.write_bytes(damaged)
        try:
            load(path)
        except ModelError:
            continue


# --- real models ---


def test_smollm2_equals_transformers(smollm2_path: Path, smollm2_reference: torch.nn.Module) -> None:
    progress: list[tuple[int, int]] = []
    decoder = load_model(
        smollm2_path, torch.float32, CPU, TorchOps(), lambda done, total: progress.append((done, total))
    )
    total = sum(tensor.num_bytes for tensor in GGUFFile(smollm2_path).tensors.values())
    assert progress == sorted(progress) and progress[0] == (0, total) and progress[-1] == (total, total)
    prompts = torch.randint(0, 49_152, (2, 33), generator=torch.Generator().manual_seed(1)).tolist()
    expected = [oracle_logits(smollm2_reference, prompt) for prompt in prompts]
    for chunk_sizes in ([10_000], [16, 7], [1]):
        for got, want in zip(run_paged(decoder, prompts, chunk_sizes), expected, strict=True):
            assert (got - want).abs().max() < 1e-3
            assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_gemma3_equals_transformers_beyond_its_window(gemma3_path: Path) -> None:
    oracle = gemma3_oracle(gemma3_path)
    decoder = load(gemma3_path)
    prompt = torch.randint(0, 262_144, (530,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        want = oracle(input_ids=torch.tensor([prompt]), logits_to_keep=16).logits[0]
    (got,) = run_paged(decoder, [prompt], [200], num_last=16)
    assert (got - want).abs().max() < 1e-3
    assert torch.equal(got.argmax(-1), want.argmax(-1))
