"""The body of `POST /v1/completions`. Knows the shape of the API only: no vocabulary, no window, no engine."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from server.errors import InvalidRequest
from server.protocol.fields import MAX_LOGPROBS, MAX_N, GenerationFields
from server.protocol.prompts import PROMPTS_SCHEMA, Prompt, parse_prompts

MAX_SEQUENCES = 4096  # prompts times n or best_of
DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _parse_prompt(value: object) -> tuple[Prompt, ...]:
    return parse_prompts(value, "prompt")


class CompletionRequest(GenerationFields):
    """What to complete, and how."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {**GenerationFields.neutral, "prompt_embeds": ()}

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_parse_prompt), PROMPTS_SCHEMA]
    suffix: str | None = Field(None, description="Fill the gap between prompt and suffix, where the model can.")
    add_special_tokens: bool | None = Field(None, description="Begin the prompt as the tokenizer does; absent: true.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(None, description="Answer with the prompt before the new text.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_N,
        description="Generate this many and answer with the n likeliest by token; no stream. Of a search: beam_width.",
    )

    @property
    def num_sequences(self) -> int:
        """How many answers each prompt gets, shown or not."""
        n = self.n or 1
        return n if self.use_beam_search else max(n, self.best_of or 1)

    @property
    def beam_width_field(self) -> tuple[str, int]:
        """Which field says how many beams a search has, and how many."""
        if self.beam_width is None and self.best_of is not None:
            return "best_of", self.best_of
        return super().beam_width_field

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do, and what contradicts itself. Raises InvalidRequest."""
        super().refuse_unsupported()
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequest(f"best_of is {self.best_of}; it must be at least n, which is {n}.", "best_of")
        if self.use_beam_search and None not in (both := (self.best_of, self.beam_width)) and both[0] != both[1]:
            raise InvalidRequest(
                "best_of and beam_width mean the same in a beam search and must not differ.", "best_of"
            )
        if self.num_sequences > n and self.stream:
            raise InvalidRequest("The best of several answers is known at their end: it is not streamed.", "best_of")
        if self.suffix and self.echo:
            raise InvalidRequest("echo and suffix exclude each other.", "echo")
        if self.suffix and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("truncate_prompt_tokens and suffix exclude each other.", "truncate_prompt_tokens")
        if self.num_sequences * len(self.prompt) > MAX_SEQUENCES:
            field = "n" if self.num_sequences == n else "best_of"
            raise InvalidRequest(
                f"{len(self.prompt)} prompts and {field} {self.num_sequences} make more than the {MAX_SEQUENCES} "
                "answers of one request.",
                field,
            )
