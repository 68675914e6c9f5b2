"""The fields that completions and chat share, with their ranges, and the reading of a body into a typed request.

Every field is honoured or refused by name; null means absent; an unknown field is reported, not refused. Knows the
shapes of the API only: no vocabulary, no window, no engine.
"""

import json
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from server.errors import InvalidRequest
from server.json_body import refuse_repeated_names
from server.protocol.field_types import AllowedTokenIds, BadWords, LogitBias, StopStrings, StopTokenIds
from server.protocol.structured_outputs import Choices, ResponseFormat, SchemaOrText, StructuredOutputs

MAX_N = 128
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 32
_MAX_LENGTH_PENALTY = 10  # to whose power a length is raised
MAX_LABEL = 1024  # characters of a text that changes no answer
MAX_SECONDS = 7 * 86400  # of a timeout
MAX_METADATA = 16  # pairs, as OpenAI takes them
_MAX_INT = 2**63 - 1
_MAX_PRIORITY = 2**31 - 1
_MAX_NAMED_FIELDS = 16  # of the ignored ones
_MAX_NAMED_LENGTH = 64
_MAX_SHOWN_LENGTH = 32  # of a number that is refused

# Hints that change no answer of this server and have no form that could be wrong.
_WITHOUT_EFFECT = frozenset({"parallel_tool_calls"})
# What to use in place of a field that is refused.
_INSTEAD = {
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "repeat_penalty": "repetition_penalty",
}

Request = TypeVar("Request", bound="RequestFields")


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: bool | None = Field(None, description="End with a chunk that counts tokens.")
    continuous_usage_stats: bool | None = Field(None, description="Count tokens in each chunk.")
    include_obfuscation: bool | None = Field(
        None, description="Fill chunks up with random characters, so that their sizes tell less of the text."
    )


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


class PromptFields(RequestFields):
    """What every request may ask that gives the model something to read."""

    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=_MAX_INT,
        description="Keep this many of the prompt's last tokens; -1: what the window holds beside max_tokens. Where "
        "neither the request nor a default bounds those below it: beside 1024, at most a fourth of the window.",
    )
    priority: int | None = Field(None, ge=-_MAX_PRIORITY, le=_MAX_PRIORITY, description="A lower one goes first.")
    timeout: float | None = Field(
        None, ge=0.001, le=MAX_SECONDS, description="Seconds in which the answer must be complete; else: 504."
    )
    queue_timeout: float | None = Field(
        None, ge=0.001, le=MAX_SECONDS, description="Seconds that it may wait before it is computed; else: 503."
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_LABEL,
        description="Share what is cached only with requests of the same key that have the same salt. Without it: with "
        "all that have none. Requests of other keys never share.",
    )
    cache_prompt: bool | None = Field(None, description="false: compute the whole prompt, whatever is cached.")
    user: str | None = Field(None, max_length=MAX_LABEL, description="A label, which changes nothing.")

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that the caller wants generated; None: he does not say."""
        return 0

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do. Raises InvalidRequest, naming the field."""
        super().refuse_unsupported()
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be -1, or at least 1, not 0.", "truncate_prompt_tokens")


class GenerationFields(PromptFields):
    """What every request for generated text may ask."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "dry_multiplier": (0,),
        "dynatemp_range": (0,),
        "kv_transfer_params": (),
        "logits_processors": ([],),
        "mirostat": (0,),
        "n_predict": (),
        "n_probs": (0,),
        "repeat_penalty": (1,),
        "tfs_z": (1,),
        "top_n_sigma": (-1,),
        "typical_p": (1,),
        "vllm_xargs": ({},),
        "xtc_probability": (0,),
    }

    # What is sampled
    max_tokens: int | None = Field(None, ge=0, le=_MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=0, le=_MAX_INT, description="The newer name of max_tokens.")
    min_tokens: int | None = Field(
        None,
        ge=0,
        le=_MAX_INT,
        description="Before them nothing ends an answer. Refused beside a form of the answer, which ends it.",
    )
    temperature: float | None = Field(None, ge=0, le=2, description="0: the most likely token.")
    top_p: float | None = Field(None, ge=0, le=1, description="0: the most likely token.")
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT, description="-1 or 0: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=_MAX_INT, description="-1: drawn anew, as without one.")
    n: int | None = Field(None, ge=1, le=MAX_N)
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Off the logit of what was generated.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="The same, times how often it was.")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Divides the logits of what stands in prompt or answer; 1: off."
    )
    logit_bias: LogitBias = ()
    allowed_token_ids: AllowedTokenIds = Field((), description="Nothing else is sampled.")
    bad_words: BadWords = Field((), description="Words that no answer completes.")

    # The likeliest answers are searched for, and none is drawn
    use_beam_search: bool | None = Field(
        None,
        description="Search for the likeliest answers, and give the n best; nothing is drawn or streamed. Their "
        "logprobs count what logit_bias, penalties and forbidden tokens change.",
    )
    beam_width: int | None = Field(
        None, ge=1, le=MAX_BEAM_WIDTH, description="Beams that live at once; absent: best_of, else n."
    )
    length_penalty: float | None = Field(
        None,
        ge=-_MAX_LENGTH_PENALTY,
        le=_MAX_LENGTH_PENALTY,
        description="Answers are compared by their log-probability over their length to this power; absent: 1.",
    )
    early_stopping: bool | None = Field(
        None, description="End with beam_width complete answers, though a better one could still come."
    )

    # The form of an answer: one of them
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's spelling of response_format.")
    guided_json: SchemaOrText = Field(None, description="An older one.")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: SchemaOrText = Field(None, description="llama.cpp's.")
    grammar: str | None = Field(None, description="llama.cpp's: in GBNF.")

    # What ends an answer
    stop: StopStrings = ()
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = Field(None, description="A stop ends the text, and is part of it.")

    # What is shown
    skip_special_tokens: bool | None = Field(None, description="Absent: true.")
    spaces_between_special_tokens: bool | None = Field(
        None, description="No tokenizer that is served here writes any, so both values mean the same."
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Of the prompt's tokens; no stream.")
    return_token_ids: bool | None = Field(None, description="Answer with the ids of prompt and answer too.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Logprobs name a token `token_id:<id>`.")
    timings_per_token: bool | None = Field(None, description="Answer with timings, a stream in each chunk.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Labels and hints, which change no answer
    safety_identifier: str | None = Field(None, max_length=MAX_LABEL)
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = Field(None, max_length=MAX_LABEL)
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None

    @property
    def streaming(self) -> StreamOptions:
        """What the stream carries besides the text."""
        return self.stream_options or StreamOptions()

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that the caller wants generated, if he says so."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def beam_width_field(self) -> tuple[str, int]:
        """Which field says how many beams a search has, and how many."""
        return ("n", self.n or 1) if self.beam_width is None else ("beam_width", self.beam_width)

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do, and what contradicts itself. Raises InvalidRequest."""
        super().refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs are not streamed; leave out stream.", "prompt_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same and must not differ.", "max_completion_tokens"
            )

    def ignored_fields(self) -> list[str]:
        """Names of the fields that nobody knows."""
        names = super().ignored_fields()
        if self.stream_options is not None:
            names += [f"stream_options.{name}" for name in self.stream_options.model_extra or {}]
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
        raise explain(error.errors(include_url=False)[0]) from None
    refuse_repeated_names(body)
    request.refuse_unsupported()
    return request


def field_path(loc: tuple[int | str, ...]) -> str | None:
    """A field in the way Python would reach it: ("messages", 0, "role") is messages[0].role."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".") or None


def explain(details: ErrorDetails) -> InvalidRequest:
    """One sentence for the first thing that is wrong, and the field in the way Python would reach it."""
    if details["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {details['ctx']['error']}.")
    param = field_path(details["loc"])
    name = param or "The body"
    if details["type"] == "missing":
        return InvalidRequest(f"{name} is required.", param)
    if details["type"] == "extra_forbidden":
        return InvalidRequest(f"There is no field {name}.", param)
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
            hint = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise InvalidRequest(f"{prefix}{name} is not supported by this server{hint}.", prefix + name)


def _equal(value: Any, allowed: object) -> bool:  # noqa: ANN401
    """Equality without Python's `0 == False`."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)
