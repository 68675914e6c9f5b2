"""The fields that completions and chat share, with their ranges, and the reading of a body into a typed request.

Every field is honoured or refused by name; null means absent; an unknown field is reported, not refused. Knows the
shapes of the API only: no vocabulary, no window, no engine.
"""

import json
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from server.errors import InvalidRequest

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024  # of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
_MAX_INT = 2**63 - 1
_MAX_NAMED_FIELDS = 16  # of the ignored ones
_MAX_NAMED_LENGTH = 64
_MAX_SHOWN_LENGTH = 32  # of a number that is refused

# Fields that change no answer of this server: labels, accounting, hints.
_WITHOUT_EFFECT = frozenset({"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user"})

Request = TypeVar("Request", bound="RequestFields")


def invalid(message: str) -> PydanticCustomError:
    """An error for a validator to raise, whose message stays as it is."""
    return PydanticCustomError("invalid", "{message}", {"message": message})


def _parse_stop(value: object) -> object:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise invalid("stop must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid(f"stop may hold at most {MAX_STOP_STRINGS} strings, not {len(strings)}")
    if not all(strings):
        raise invalid("a stop string must not be empty")
    if any(len(s.encode()) > MAX_STOP_BYTES for s in strings):
        raise invalid(f"a stop string may take at most {MAX_STOP_BYTES} bytes")
    return tuple(strings)


def _parse_stop_token_ids(value: object) -> object:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise invalid("stop_token_ids must be a list of token ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, not {len(value)}")
    return tuple(value)


_STOP_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
)
_IDS_SCHEMA = WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]})


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(strict=True, extra="allow")
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "continuous_usage_stats": (False,),
        "include_obfuscation": (False,),
    }

    include_usage: bool | None = None


class RequestFields(BaseModel):
    """What every request has: the model's name, and a verdict on fields that are not read."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)
    # Fields that would change the answer and are not supported -> the values at which they change nothing.
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {}

    model: str | None = Field(None, description="A served name; absent: the model that is served.")

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do. Raises InvalidRequest, naming the field."""
        refuse_non_neutral(self, self.neutral, "")

    def ignored_fields(self) -> list[str]:
        """Names of the fields that nobody knows."""
        return bounded_names(
            [name for name in self.model_extra or {} if name not in self.neutral and name not in _WITHOUT_EFFECT]
        )


class GenerationFields(RequestFields):
    """What every request for generated text may ask."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "frequency_penalty": (0,),
        "grammar": ("",),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "include_stop_str_in_output": (False,),
        "json_schema": (),
        "length_penalty": (1,),
        "logit_bias": ({},),
        "min_tokens": (0,),
        "presence_penalty": (0,),
        "priority": (0,),
        "prompt_logprobs": (),
        "repeat_penalty": (1,),
        "repetition_penalty": (1,),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "structured_outputs": (),
        "truncate_prompt_tokens": (),
        "typical_p": (1,),
        "use_beam_search": (False,),
    }

    max_tokens: int | None = Field(None, ge=0, le=_MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=0, le=_MAX_INT, description="The newer name of max_tokens.")
    temperature: float | None = Field(None, ge=0, le=2, description="0: the most likely token.")
    top_p: float | None = Field(None, ge=0, le=1, description="0: the most likely token.")
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT, description="-1 or 0: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=_MAX_INT)
    n: int | None = Field(None, ge=1, le=MAX_N)
    stop: Annotated[tuple[str, ...], BeforeValidator(_parse_stop), _STOP_SCHEMA] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_parse_stop_token_ids), _IDS_SCHEMA] = ()
    ignore_eos: bool | None = None
    return_token_ids: bool | None = Field(None, description="Answer with the ids of prompt and answer too.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """A stream shall end with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that the caller wants generated, if he says so."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do. Raises InvalidRequest, naming the field."""
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest("stream_options needs stream to be true.", "stream_options")
            refuse_non_neutral(self.stream_options, StreamOptions.neutral, "stream_options.")
        super().refuse_unsupported()
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same and must not differ.", "max_completion_tokens"
            )

    def ignored_fields(self) -> list[str]:
        """Names of the fields that nobody knows."""
        names = super().ignored_fields()
        if self.stream_options is not None:
            unknown = (self.stream_options.model_extra or {}).keys() - StreamOptions.neutral.keys()
            names += [f"stream_options.{name}" for name in sorted(unknown)]
        return bounded_names(names)


def bounded_names(names: list[str]) -> list[str]:
    """As many of the names, and as much of each, as a header may carry."""
    return [name[:_MAX_NAMED_LENGTH] for name in names[:_MAX_NAMED_FIELDS]]


def parse_body(request_type: type[Request], body: bytes) -> Request:
    """Read a JSON body.

    Raises:
        InvalidRequest: for the first thing that is wrong with it.
    """
    try:
        request = request_type.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from None
    request.refuse_unsupported()
    return request


def field_path(loc: tuple[int | str, ...]) -> str | None:
    """A field in the way Python would reach it: ("messages", 0, "role") is messages[0].role."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".") or None


def _explain(details: ErrorDetails) -> InvalidRequest:
    """One sentence for the first thing that is wrong, and the field in the way Python would reach it."""
    if details["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {details['ctx']['error']}.")
    param = field_path(details["loc"])
    name = param or "The body"
    if details["type"] == "missing":
        return InvalidRequest(f"{name} is required.", param)
    if details["type"] == "invalid":
        return InvalidRequest(f"{details['msg']}.", param)
    message = details["msg"].replace("should", "must", 1)
    for subject in ("Input", "List", "String"):
        message = message.removeprefix(f"{subject} ")
    value = json.dumps(details["input"]) if isinstance(details["input"], bool | int | float) else ""
    shown = f", not {value}" if 0 < len(value) <= _MAX_SHOWN_LENGTH else ""
    return InvalidRequest(f"{name} {message}{shown}.", param)


def refuse_non_neutral(model: BaseModel, neutral: dict[str, tuple[object, ...]], prefix: str) -> None:
    """Refuse fields that are known, not supported, and not at a neutral value. Raises InvalidRequest."""
    for name, value in (model.model_extra or {}).items():
        if name in neutral and value is not None and not any(_equal(value, allowed) for allowed in neutral[name]):
            raise InvalidRequest(f"{prefix}{name} is not supported by this server yet.", prefix + name)


def _equal(value: Any, allowed: object) -> bool:  # noqa: ANN401
    """Equality without Python's `0 == False`."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)
