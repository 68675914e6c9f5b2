"""What weights become: codes out of GGUF blocks mean what the gguf package says, others are rounded to the nearest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.model_ops.torch_ops import TorchOps
from kernels.quantized_weight import GROUP_SIZE, QuantizedWeight, pack, quantize
from models.decoder import Decoder
from models.gguf_blocks import CODE_BITS, coded_rows
from models.loader import load_model
from models.quantization import Quantization, quantize_weight
from tests.models.gguf_files import to_gguf
from tests.models.tiny_models import SIZES, build, save

CPU = torch.device("cpu")
NUM_SCALES = {Type.Q4_1: 2, Type.Q4_K: 2}  # float16 numbers at the start of a block; elsewhere one


def load(path: Path, quantization: Quantization) -> Decoder:
    return load_model(path, torch.float32, CPU, TorchOps(), lambda done, total: None, quantization)


def weights_of(decoder: Decoder) -> dict[str, nn.Parameter | QuantizedWeight]:
    """Every matrix by what it is called in the decoder."""
    weights = {"embedding": decoder.embedding, "head": decoder.head.weight}
    for index, layer in enumerate(decoder.layers):
        weights[f"{index}.qkv"] = layer.attention.qkv.weight
        weights[f"{index}.output"] = layer.attention.output.weight
        weights[f"{index}.gate_up"] = layer.mlp.gate_up.weight
        weights[f"{index}.down"] = layer.mlp.down.weight
    return weights


def assert_rounded(weight: QuantizedWeight, floats: torch.Tensor, *, by_output: bool = False) -> None:
    """No value is further from its own than half a step, and the largest of each group (or output) is not cut off."""
    size = floats.shape[1] if by_output else GROUP_SIZE
    steps = floats.unflatten(1, (-1, size)).abs().amax(2, keepdim=True) / 127
    distances = (weight.dequantize() - floats).unflatten(1, (-1, size)).abs()
    assert (distances <= 0.502 * steps + 1e-7).all()  # a step is a float16, and may be 2^-11 off


@pytest.mark.parametrize(("kind", "bits"), [(kind, bits) for kind, all_bits in CODE_BITS.items() for bits in all_bits])
def test_codes_mean_what_the_gguf_package_reads(kind: Type, bits: int) -> None:
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind) * 8 + bits)
    num_rows, in_features = 37, 2 * block_values * (256 // block_values)
    blocks = rng.integers(0, 256, (num_rows * in_features // block_values, block_bytes), dtype=np.uint8)
    scales = rng.uniform(0.01, 2.0, (len(blocks), NUM_SCALES.get(kind, 1))).astype(np.float16)
    scales *= rng.choice(np.float16([-1, 1]), scales.shape)
    blocks[:, : 2 * scales.shape[1]] = scales.view(np.uint8)
    rows = coded_rows(blocks, kind, in_features, bits)
    weight = pack(rows.codes, rows.scales, rows.minimums)
    assert (weight.bits, weight.out_features, weight.in_features) == (bits, num_rows, in_features)
    got, want = weight.dequantize().numpy(), gguf.quants.dequantize(blocks.reshape(1, -1), kind).reshape(num_rows, -1)
    if kind != Type.Q4_K:
        np.testing.assert_array_equal(got, want)
        return
    # Its scales have six bits times a float16: one float16 holds all but the last of them.
    assert rows.minimums is not None
    largest = (15 * rows.scales.float().abs() + rows.minimums.float().abs()).repeat_interleave(GROUP_SIZE, 1).numpy()
    assert (np.abs(got - want) <= largest * 2.0**-11).all()


def test_four_bits_are_kept_where_a_whole_weight_has_them(tmp_path: Path) -> None:
    types = {"attn_q": Type.Q4_0, "attn_k": Type.Q4_1, "attn_v": Type.Q4_0, "ffn_gate": Type.Q4_1, "ffn_up": Type.Q8_0}
    types |= {"ffn_down": Type.Q4_1, "attn_output": Type.Q5_0, "token_embd": Type.Q8_0, "output": Type.F16}
    model = build("llama_biases")
    path = to_gguf(model, tmp_path / "m.gguf", lambda name: next(t for part, t in types.items() if part in name))
    floats = weights_of(load(path, "none"))
    as_stored, as_int8 = weights_of(load(path, "gguf")), weights_of(load(path, "int8"))
    exact = {"qkv", "down", "output", "embedding"}
    for name, value in floats.items():
        part = name.split(".")[-1]
        stored, int8 = as_stored[name], as_int8[name]
        assert isinstance(value, nn.Parameter) and isinstance(stored, QuantizedWeight)
        assert isinstance(int8, QuantizedWeight) and int8.bits == 8
        assert stored.bits == (4 if part in ("qkv", "down") else 8)
        if part in exact:
            assert torch.equal(stored.dequantize(), value)
        else:
            assert_rounded(stored, value)
        assert_rounded(int8, value, by_output=True)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gemma3"])
def test_a_directory_is_rounded_and_a_tied_head_shared(name: str, tmp_path: Path) -> None:
    path = save(build(name), tmp_path)
    exact, rounded = load(path, "none"), load(path, "int8")
    for part, floats in weights_of(exact).items():
        weight = weights_of(rounded)[part]
        assert isinstance(weight, QuantizedWeight)
        assert_rounded(weight, floats, by_output=True)
    assert (rounded.head.weight is rounded.embedding) == exact.config.tie_word_embeddings
    for (part, floats), (same, others) in zip(exact.named_parameters(), rounded.named_parameters(), strict=False):
        if part == same and "norm" in part:
            assert torch.equal(floats, others)
    assert not any(parameter.dim() == 2 and "norm" not in part for part, parameter in rounded.named_parameters())


class LargestFloats(TorchDispatchMode):
    """Notes how many float32 values the largest tensor has that is made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.num_values = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            self.num_values = max(self.num_values, made.numel())
        return made


def test_a_large_weight_is_rounded_in_pieces() -> None:
    weight = torch.randn(3001, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()

    class Source:
        def __init__(self) -> None:
            self.shapes = {"weight": tuple(weight.shape)}

        def code_bits(self, source_name: str) -> frozenset[int]:
            return frozenset()

        def pieces(self, source_name: str) -> Iterator[tuple[int, torch.Tensor]]:
            yield 0, weight

    with LargestFloats() as largest:
        rounded = quantize_weight(Source(), ["weight"], "int8")
    assert largest.num_values < weight.numel() / 4
    assert rounded is not None
    whole = quantize(weight, by_output=True)
    assert torch.equal(rounded.codes, whole.codes) and torch.equal(rounded.scales, whole.scales)


def test_what_is_no_whole_groups_or_no_numbers_stays_as_it_is(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"intermediate_size": 80})).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3, 5] = float("inf")
        model.model.layers[2].mlp.up_proj.weight[0, 0] = float("nan")
    path = save(model, tmp_path)
    exact, rounded = weights_of(load(path, "none")), weights_of(load(path, "int8"))
    floats = {name for name, weight in rounded.items() if isinstance(weight, nn.Parameter)}
    assert floats == {"0.down", "1.down", "2.down", "1.output", "2.gate_up"}
    for name in floats:
        torch.testing.assert_close(rounded[name], exact[name], rtol=0, atol=0, equal_nan=True)
