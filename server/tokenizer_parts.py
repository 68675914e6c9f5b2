"""What the readers of tokenizer files hand to `Tokenizer`, and the error they raise. Knows no file format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import tokenizers
from tokenizers import processors

Spelling = Literal["byte_level", "sentencepiece"]


class TokenizerError(Exception):
    """A tokenizer cannot be built, or a text cannot be encoded. The message is one clear sentence."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """One tokenizer, whatever file it comes from."""

    backend: tokenizers.Tokenizer  # never changed once it stands here: threads share it
    spelling: Spelling  # how a token of the vocabulary spells its bytes
    byte_fallback: bool  # sentencepiece only: <0xNN> is the byte NN
    literal_ids: frozenset[int]  # tokens whose text stands for itself, whatever the spelling
    special_token_ids: frozenset[int]  # not part of the text for a reader
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>", for chat templates
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # "default", "tool_use" -> source


def add_boundary_tokens(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` put these tokens, and no others, around what it encodes; None = none on that side."""
    pieces = [f"{token}:0" for token in (bos, "$A", eos) if token is not None]
    special_tokens = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special_tokens)
