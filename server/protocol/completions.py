"""The body of `POST /v1/completions`. Knows the shape of the API only: no vocabulary, no window, no engine."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from server.errors import InvalidRequest
from server.protocol.fields import MAX_LOGPROBS, GenerationFields, invalid

MAX_PROMPTS = 2048
MAX_SEQUENCES = 4096  # prompts times n
DEFAULT_MAX_TOKENS = 16  # OpenAI's

Prompt = str | tuple[int, ...]


def _parse_prompt(value: object) -> object:
    """Bring the four forms of a prompt into one: a tuple of texts and token id tuples."""
    if value is None:
        raise invalid("prompt must be given")
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        prompts: list[object] = [value]
    elif isinstance(value, list):
        prompts = value
    else:
        raise invalid("prompt must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not prompts:
        raise invalid("prompt must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"prompt may hold at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    return tuple(_parse_one_prompt(prompt) for prompt in prompts)


def _parse_one_prompt(prompt: object) -> Prompt:
    if not isinstance(prompt, str | list):
        raise invalid("prompt must hold strings or lists of token ids only")
    if not prompt:
        raise invalid("prompt must not be empty")
    if isinstance(prompt, str):
        return prompt
    if not all(type(token_id) is int for token_id in prompt):
        raise invalid("a prompt that is a list must hold token ids only")
    return tuple(prompt)


_STRINGS = {"type": "array", "items": {"type": "string"}}
_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_PROMPT_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string"}, _STRINGS, _INTEGERS, {"type": "array", "items": _INTEGERS}]}
)


class CompletionRequest(GenerationFields):
    """What to complete, and how."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerationFields.neutral,
        "add_special_tokens": (True,),
        "prompt_embeds": (),
        "suffix": ("",),
    }

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_parse_prompt), _PROMPT_SCHEMA]
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
