"""The body of `POST /v1/embeddings` and of its answer. Knows the shape of the API only: no vocabulary, no engine."""

from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field

from server.protocol.fields import PromptFields
from server.protocol.prompts import PROMPTS_SCHEMA, Prompt, parse_prompts
from server.protocol.responses import PromptTokensDetails


def _parse_input(value: object) -> tuple[Prompt, ...]:
    return parse_prompts(value, "input")


class EmbeddingRequest(PromptFields):
    """What to embed, and how."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "chat_template": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "instruction": ("",),
        "messages": (),
        "truncate": ("NONE",),
        "use_activation": (True,),
    }

    input: Annotated[tuple[Prompt, ...], BeforeValidator(_parse_input), PROMPTS_SCHEMA]
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: the numbers as little-endian float32, base64-encoded."
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="Only the model's own number: its vectors mean nothing when they are cut.",
    )
    pooling: Literal["mean", "last"] | None = Field(
        None,
        description="mean, the default: the mean of the last layer's hidden states, after the final norm, over all "
        "tokens. last: that of the last token.",
    )
    normalize: bool | None = Field(None, description="Scale the vector to length 1, which is the default.")
    add_special_tokens: bool | None = Field(
        None, description="Put the model's beginning and end tokens around a text where it wants them: the default."
    )


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(msgspec.Struct, frozen=True):
    """One vector."""

    index: int
    embedding: list[float] | str  # base64 of little-endian float32 where that was asked for
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    """The answer."""

    model: str
    usage: EmbeddingUsage
    object: str = "list"
    data: tuple[Embedding, ...] = ()  # in the order of the inputs; the last field, since it is written piece by piece
