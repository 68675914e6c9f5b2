"""What the server and the inspector's process say to each other, as msgpack. Knows neither a socket nor HTTP."""

from typing import Literal

import msgspec

from server.engine_config import EngineConfig
from server.token_ids import TokenIds

MAX_PROMPT_TOKENS = 256
MAX_TOKENS = 32  # after the prompt

RefusalCause = Literal["unavailable", "gone", "out_of_range", "failed"]


class InspectorSetup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the process, once: which model it loads, and as what the engine serves that."""

    config: EngineConfig
    device: str  # that the engine runs on
    quantization: str  # that it chose
    num_threads: int


class InspectPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the process: compute a prompt and tokens after it. Answered by Inspected."""

    inspection_id: str
    token_ids: TokenIds
    max_tokens: int  # at least one


class ShowHead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the process: what did a query head of a layer do? Answered by Picture."""

    inspection_id: str
    layer: int
    head: int


class ShowInput(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the process: what went into a layer's attention at a position? Answered by Picture."""

    inspection_id: str
    layer: int
    position: int


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A token that could come next."""

    token_id: int
    probability: float


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One pass through the model."""

    first_position: int  # of the tokens that it computed
    num_tokens: int  # that it computed
    num_blocks: int  # that were held then
    candidates: list[Candidate]  # the likeliest first, which was taken


class LayerShapes(msgspec.Struct, frozen=True):
    """Of what one layer's attention multiplies, as lists of sizes."""

    x: list[int]  # the tokens' hidden states, normed
    w_q: list[int]  # [outputs, inputs]
    w_k: list[int]
    w_v: list[int]
    q: list[int]  # [tokens, heads, head size]
    k: list[int]
    v: list[int]
    w_o: list[int]
    sliding_window: int | None  # tokens that a token sees, itself included; None = all before it
    rope: int  # index of its frequencies


class Rope(msgspec.Struct, frozen=True):
    """A rotary embedding: pair i of a head turns by frequencies[i] for each position."""

    theta: float
    magnitude: float  # of the rotated pairs, where contexts are stretched; else 1
    frequencies: list[float]  # radians per position, [head_dim / 2]


class AttentionOutline(msgspec.Struct, frozen=True):
    """What all layers share."""

    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    logit_softcap: float | None
    has_bias: bool  # of the projections
    has_norms: bool  # of each query and key head, before the rotation
    norms_output: bool  # what attention adds to a token is normed first


class HeadHabit(msgspec.Struct, frozen=True):
    """The head that does something more than all others, for this prompt."""

    name: str  # one of models.inspection.HABITS
    layer: int
    head: int
    share: float  # of its attention, on average


class Inspected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From the process: all of a prompt but its large tensors."""

    token_ids: list[int]  # of the prompt, and those that followed
    num_prompt_tokens: int
    block_ids: list[int]  # the block table at the end
    num_pool_blocks: int
    other_block_ids: list[int]  # of the pool, held by sequences that are made up
    steps: list[StepRecord]
    outline: AttentionOutline
    layers: list[LayerShapes]
    ropes: list[Rope]
    habits: list[HeadHabit]


class Picture(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From the process: tensors for the page, see `server.dashboard.inspection_picture`."""

    content: bytes


class InspectionRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From the process: it cannot answer. After "unavailable" it ends."""

    cause: RefusalCause
    message: str  # for a person


GONE = InspectionRefused("gone", "What was computed for this prompt is gone: inspect it again.")
Question = InspectPrompt | ShowHead | ShowInput
Answer = Inspected | Picture | InspectionRefused
