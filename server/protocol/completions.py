"""The body of `POST /v1/completions`. Knows the shape of the API only: no vocabulary, no window, no engine."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from server.errors import InvalidRequest
from server.protocol.fields import MAX_LOGPROBS, GenerationFields
from server.protocol.prompts import PROMPTS_SCHEMA, Prompt, parse_prompts

MAX_SEQUENCES = 4096  # prompts times n
DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _parse_prompt(value: object) -> tuple[Prompt, ...]:
    return parse_prompts(value, "prompt")


class CompletionRequest(GenerationFields):
    """What to complete, and how."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerationFields.neutral,
        "add_special_tokens": (True,),
        "prompt_embeds": (),
        "suffix": ("",),
    }

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_parse_prompt), PROMPTS_SCHEMA]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do. Raises InvalidRequest."""
        super().refuse_unsupported()
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise InvalidRequest(f"best_of is not supported yet unless it equals n, which is {n}.", "best_of")
        if n * len(self.prompt) > MAX_SEQUENCES:
            raise InvalidRequest(
                f"{len(self.prompt)} prompts and n {n} make more than the {MAX_SEQUENCES} answers of one request.", "n"
            )
