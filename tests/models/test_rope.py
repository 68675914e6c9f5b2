"""Rotary embedding: frequencies against transformers, and what the rotation must preserve."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels.attention.rotation import rotate
from kernels.model_ops.torch_ops import TorchOps
from models.config import LinearScaling, RopeParams, YarnScaling
from models.hf_fields import Fields
from models.hf_rope import read_rope
from models.rope import RotaryEmbedding, inverse_frequencies

CPU = torch.device("cpu")


@st.composite
def rope_parameters(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from([1e4, 1e5, 5e5, 1e6]))}
    if kind != "default":
        parameters["factor"] = draw(st.floats(1.0, 64.0))
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = draw(st.sampled_from([64, 2048, 8192, 32_768]))
    if kind == "llama3":
        parameters["low_freq_factor"] = draw(st.floats(0.5, 2.0))
        parameters["high_freq_factor"] = draw(st.floats(2.5, 8.0))
    if kind == "yarn":
        parameters |= draw(
            st.sampled_from(
                [
                    {},
                    {"beta_fast": 16.0, "beta_slow": 2.0},
                    {"attention_factor": 1.3},
                    {"mscale": 0.7, "mscale_all_dim": 1.1},
                    {"truncate": False},
                ]
            )
        )
    return parameters


@settings(deadline=None)
@given(parameters=rope_parameters(), head_dim=st.sampled_from([16, 64, 128]))
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=65_536,
        rope_parameters=dict(parameters),
    )
    if parameters["rope_type"] == "default":
        want, magnitude = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        want, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, CPU)
    fields = Fields({"rope_parameters": parameters}, "config.json")
    params = read_rope(fields, 10_000.0, None, 65_536, head_dim)["full_attention"]
    rotary = RotaryEmbedding(params, head_dim, CPU)
    torch.testing.assert_close(rotary.inverse_frequencies, want, rtol=1e-5, atol=0)
    assert rotary.magnitude == pytest.approx(magnitude)


def test_the_old_form_means_the_same_as_the_new_one() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    new = Fields({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | scaling}, "config.json")
    for key in ("type", "rope_type"):
        old = Fields({"rope_theta": 5e5, "rope_scaling": {key: "llama3"} | scaling}, "config.json")
        assert read_rope(old, 1e4, None, 131_072, 128) == read_rope(new, 1e4, None, 131_072, 128)


def test_gemma_scales_its_global_layers_only() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    want = {"full_attention": RopeParams(1e6, LinearScaling(8.0)), "sliding_attention": RopeParams(1e4)}
    old = Fields({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling}, "config.json")
    assert read_rope(old, 1e6, 1e4, 131_072, 256) == want
    nested = {"full_attention": scaling | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert read_rope(Fields({"rope_parameters": nested}, "config.json"), 1e6, 1e4, 131_072, 256) == want
    # Without a base of their own, sliding layers rotate as the others do.
    assert read_rope(Fields({"rope_theta": 5e5}, "config.json"), 1e4, None, 4096, 64)["sliding_attention"].theta == 5e5


def angles(rotary: RotaryEmbedding, positions: torch.Tensor) -> list[torch.Tensor]:
    """Cosine and sine, [num_tokens, 1, head_dim / 2] each."""
    return [angle[:, None] for angle in rotary.angles(positions, TorchOps())]


@given(distance=st.integers(0, 500), first=st.integers(0, 2000), second=st.integers(0, 2000))
def test_scores_depend_on_the_distance_alone(distance: int, first: int, second: int) -> None:
    rotary = RotaryEmbedding(RopeParams(10_000.0), 32, CPU)
    generator = torch.Generator().manual_seed(distance)
    query, key = torch.randn(2, 1, 32, generator=generator, dtype=torch.float64)

    def score(position: int) -> torch.Tensor:
        positions = torch.tensor([position + distance, position])
        rotated = rotate(torch.stack((query, key)), *angles(rotary, positions))
        return (rotated[0] * rotated[1]).sum()

    # The angle itself is rounded to float32.
    torch.testing.assert_close(score(first), score(second), rtol=0, atol=3e-3)
    torch.testing.assert_close(rotate(query[None], *angles(rotary, torch.tensor([first]))).norm(), query.norm())


def test_position_zero_is_not_rotated_but_yarn_scales_it() -> None:
    heads = torch.randn(1, 2, 16)
    plain = RotaryEmbedding(RopeParams(10_000.0), 16, CPU)
    assert torch.equal(rotate(heads, *angles(plain, torch.tensor([0]))), heads)
    yarn = RotaryEmbedding(RopeParams(10_000.0, YarnScaling(4.0, 64, attention_factor=1.25)), 16, CPU)
    torch.testing.assert_close(rotate(heads, *angles(yarn, torch.tensor([0]))), heads * 1.25)


def test_frequency_factors_divide() -> None:
    plain = inverse_frequencies(RopeParams(10_000.0), 8)
    factored = inverse_frequencies(RopeParams(10_000.0, frequency_factors=(1.0, 2.0, 4.0, 8.0)), 8)
    torch.testing.assert_close(factored, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))
