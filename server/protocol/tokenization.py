"""The bodies of `POST /tokenize` and `POST /detokenize` and of their answers: vLLM's form, and llama.cpp's beside it.

Knows the shape of the API only: no vocabulary, no window.
"""

from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from server.errors import InvalidRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.field_types import invalid
from server.protocol.fields import RequestFields

MAX_TOKENS = 1 << 20  # of one text to be put together


def _parse_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise invalid("tokens must be a list of token ids")
    if len(value) > MAX_TOKENS:
        raise invalid(f"tokens may hold at most {MAX_TOKENS} ids, not {len(value)}")
    return tuple(value)


class TokenizeRequest(RequestFields):
    """A text to be cut into tokens: `prompt` as vLLM calls it, `content` as llama.cpp does. With `messages`: a chat."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {"parse_special": (True,)}

    prompt: str | None = None
    content: str | None = None
    messages: list[Any] | None = Field(None, description="A conversation, with the fields of a chat request.")
    add_special_tokens: bool | None = Field(
        None, description="Put the model's beginning and end tokens around it; the default for a prompt only."
    )
    add_special: bool | None = Field(None, description="llama.cpp's name of add_special_tokens.")
    return_token_strs: bool | None = Field(None, description="Answer with the vocabulary's spelling of each token.")
    with_pieces: bool | None = Field(
        None, description="Answer with the text of each token, or its bytes where they are no text by themselves."
    )

    @property
    def is_chat(self) -> bool:
        """It is a conversation, to be read as TokenizeChatRequest."""
        return self.messages is not None

    @property
    def wants_special_tokens(self) -> bool:
        """Put the model's beginning and end tokens around the text."""
        asked = self.add_special_tokens if self.add_special_tokens is not None else self.add_special
        return self.prompt is not None if asked is None else asked

    def refuse_unsupported(self) -> None:
        """Refuse what is no request for one text. Raises InvalidRequest, naming the field."""
        if self.is_chat:
            self._refuse_beside_messages()
            return
        super().refuse_unsupported()
        if self.prompt is None and self.content is None:
            raise InvalidRequest("One of prompt, messages and content is required.", "prompt")
        if self.prompt is not None and self.content is not None:
            raise InvalidRequest("prompt and content are two names of the same text: give one.", "content")
        if None not in (self.add_special_tokens, self.add_special) and self.add_special != self.add_special_tokens:
            raise InvalidRequest("add_special and add_special_tokens mean the same and must not differ.", "add_special")

    def _refuse_beside_messages(self) -> None:
        for name in ("prompt", "content"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name} and messages exclude each other.", name)


class TokenizeChatRequest(ChatCompletionRequest):
    """A conversation to be written out with the model's template and cut into tokens: the body of a chat request."""

    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(RequestFields):
    """Tokens to be put together to a text."""

    tokens: Annotated[
        tuple[int, ...],
        BeforeValidator(_parse_tokens),
        WithJsonSchema({"type": "array", "items": {"type": "integer"}, "maxItems": MAX_TOKENS}),
    ]
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out; by default they are text.")


class TokenPiece(msgspec.Struct, frozen=True, gc=False):
    """One token, as llama.cpp shows it."""

    id: int
    piece: str | tuple[int, ...]  # its text; its bytes where they are no text by themselves


class Tokenization(msgspec.Struct, frozen=True):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...] | list[TokenPiece]
    token_strs: list[str] | None = None


class Detokenization(msgspec.Struct, frozen=True):
    """The answer of `/detokenize`: the text, under both servers' names of it."""

    prompt: str
    content: str
