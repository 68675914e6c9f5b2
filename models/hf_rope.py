"""Reads the rotary embedding's settings from a Hugging Face configuration, in the old form and the new one.

Old: rope_theta, rope_scaling, and Gemma 3's rope_local_base_freq. New: rope_parameters, one object for all layers or
one for each layer type. Must not know tensors.
"""

from models.config import LinearScaling, Llama3Scaling, RopeParams, RopeScaling, YarnScaling, yarn_magnitude
from models.errors import UnsupportedModelError
from models.hf_fields import Fields

LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(
    fields: Fields, theta: float, local_theta: float | None, max_positions: int, head_dim: int
) -> dict[str, RopeParams]:
    """The rotary embedding of each layer type.

    Args:
        fields: the model's configuration.
        theta: the base where the configuration has none.
        local_theta: the base of sliding layers in a family that keeps a second one (Gemma 3), unscaled in the old
            form; None: sliding layers rotate as the others do.
        max_positions: what a scaling takes for the original length where it is not given.
        head_dim: must be rotated whole.

    Raises:
        UnsupportedModelError: a kind of scaling that is not supported, or a partial rotation.
    """
    theta = fields.positive("rope_theta", theta)
    _check_whole_head(fields, head_dim)
    new = fields.section("rope_parameters")
    if any(new.has(kind) for kind in LAYER_TYPES):
        defaults = {"full_attention": theta, "sliding_attention": local_theta or theta}
        return {kind: _parse(new.section(kind), defaults[kind], max_positions, head_dim) for kind in LAYER_TYPES}
    flat = new if fields.has("rope_parameters") else fields.section("rope_scaling")
    full = _parse(flat, theta, max_positions, head_dim)
    local = full if local_theta is None else RopeParams(local_theta)
    return {"full_attention": full, "sliding_attention": local}


def _parse(rope: Fields, theta: float, max_positions: int, head_dim: int) -> RopeParams:
    _check_whole_head(rope, head_dim)
    return RopeParams(rope.positive("rope_theta", theta), _scaling(rope, max_positions))


def _scaling(rope: Fields, max_positions: int) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModelError(
            f"{rope.where}: rope_type is {kind!r}; supported are default, linear, llama3 and yarn"
        )
    factor = rope.positive("factor")
    if kind == "linear":
        return LinearScaling(factor)
    original = rope.integer("original_max_position_embeddings", max_positions)
    if original < 1:
        raise rope.wrong("original_max_position_embeddings", "at least 1")
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if high <= low:
            raise rope.wrong("high_freq_factor", f"above low_freq_factor, {low}")
        return Llama3Scaling(factor, low, high, original)
    return YarnScaling(
        factor,
        original,
        rope.positive("attention_factor", _yarn_attention_factor(rope, factor)),
        rope.positive("beta_fast", 32.0),
        rope.positive("beta_slow", 1.0),
        rope.flag("truncate", True),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """YaRN, section 3.4: 0.1 ln(s) + 1; with mscale and mscale_all_dim, the ratio of the two (DeepSeek)."""
    if rope.raw("mscale") and rope.raw("mscale_all_dim"):
        scale, scale_all = rope.positive("mscale"), rope.positive("mscale_all_dim")
        return yarn_magnitude(factor, scale) / yarn_magnitude(factor, scale_all)
    return yarn_magnitude(factor, 1.0)


def _check_whole_head(fields: Fields, head_dim: int) -> None:
    fraction = fields.number("partial_rotary_factor", 1.0)
    if int(head_dim * fraction) != head_dim:
        raise UnsupportedModelError(
            f"{fields.where}: partial_rotary_factor is {fraction}; only rotation of the whole head is supported"
        )
