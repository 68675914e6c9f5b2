"""What the page "Inspector" shows of a prompt, as JSON, but for the large tensors.

That is what was computed, with the texts of its tokens, and what the engine's own cache takes for them. Pure functions.
"""

from typing import Any

import msgspec

from server.dashboard.inspection_messages import AttentionOutline, HeadHabit, Inspected, LayerShapes, Rope
from server.messages import EngineInfo
from server.tokenizer import Tokenizer


class ShownToken(msgspec.Struct, frozen=True):
    """One token."""

    id: int
    text: str


class ShownCandidate(msgspec.Struct, frozen=True):
    """A token that could come next."""

    id: int
    text: str
    probability: float


class ShownStep(msgspec.Struct, frozen=True):
    """One pass through the model."""

    first_position: int
    num_tokens: int
    num_blocks: int
    candidates: list[ShownCandidate]


class ServedCache(msgspec.Struct, frozen=True):
    """The engine's cache, in which a token takes other bytes than where it is inspected."""

    dtype: str
    quantization: str  # of the weights
    device: str
    num_blocks: int
    max_model_len: int
    bytes_per_token_per_layer: float  # keys and values of all heads, scales included


class InspectionReport(msgspec.Struct, frozen=True):
    """A prompt, looked at."""

    id: str
    model: str
    tokens: list[ShownToken]  # the last one was chosen and not computed
    num_prompt_tokens: int
    outline: AttentionOutline
    layers: list[LayerShapes]
    ropes: list[Rope]
    habits: list[HeadHabit]
    steps: list[ShownStep]
    block_size: int
    block_ids: list[int]
    num_pool_blocks: int  # where it was inspected
    other_block_ids: list[int]  # of that pool, held by others
    served: ServedCache


def inspection_report(
    inspection_id: str, model: str, inspected: Inspected, info: EngineInfo, tokenizer: Tokenizer
) -> InspectionReport:
    """What the page shows of an inspection, by an engine that says `info` of itself."""
    num_slots = info.num_blocks * info.block_size * inspected.outline.num_layers
    return InspectionReport(
        id=inspection_id,
        model=model,
        tokens=[ShownToken(token_id, tokenizer.token_text(token_id)) for token_id in inspected.token_ids],
        num_prompt_tokens=inspected.num_prompt_tokens,
        outline=inspected.outline,
        layers=inspected.layers,
        ropes=inspected.ropes,
        habits=inspected.habits,
        steps=[
            ShownStep(
                step.first_position,
                step.num_tokens,
                step.num_blocks,
                [
                    ShownCandidate(each.token_id, tokenizer.token_text(each.token_id), each.probability)
                    for each in step.candidates
                ],
            )
            for step in inspected.steps
        ],
        block_size=info.block_size,
        block_ids=inspected.block_ids,
        num_pool_blocks=inspected.num_pool_blocks,
        other_block_ids=inspected.other_block_ids,
        served=ServedCache(
            dtype=info.dtype,
            quantization=info.quantization,
            device=info.device,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            bytes_per_token_per_layer=info.kv_cache_bytes / num_slots,
        ),
    )


def inspector_limits(max_prompt_tokens: int, max_tokens: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the page may ask for."""
    return {
        "max_prompt_tokens": max_prompt_tokens,
        "max_tokens": max_tokens,
        "has_chat_template": tokenizer.chat_template is not None,
    }
