"""The answers of `GET /v1/models`, in OpenAI's form with vLLM's additions, and in Anthropic's. Plain structs."""

import msgspec


class ModelCard(msgspec.Struct, frozen=True):
    """A model that requests may name."""

    id: str
    created: int  # when the server started
    max_model_len: int | None  # None while the model is loading
    root: str  # the name that answers; the others mean the same model
    parent: str | None = None
    object: str = "model"
    owned_by: str = "octavo"


class ModelList(msgspec.Struct, frozen=True):
    """Every model that requests may name."""

    data: list[ModelCard]
    object: str = "list"


class AnthropicModel(msgspec.Struct, frozen=True):
    """A model that requests may name, as Anthropic's clients read it."""

    id: str
    display_name: str
    created_at: str  # RFC 3339
    max_input_tokens: int | None
    max_tokens: int | None
    lifecycle: str = "active"
    type: str = "model"


class AnthropicModelPage(msgspec.Struct, frozen=True):
    """Some of them, and where others are to be found."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
