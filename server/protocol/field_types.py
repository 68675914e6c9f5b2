"""Types of request fields that take more than one form or need a cap on each of their parts.

Each brings what JSON gives into one frozen form, or says what is wrong with it. Knows no vocabulary: whether an id is a
token's is checked against the model later.
"""

from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024  # of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 65536
MAX_LOGIT_BIAS = 1024  # tokens
MAX_BIAS = 100  # OpenAI's: enough to force a token, or to ban it
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 256  # of one
_MAX_ID_DIGITS = 20


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


def _parse_token_ids(value: object, name: str, limit: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise invalid(f"{name} must be a list of token ids")
    if len(value) > limit:
        raise invalid(f"{name} may hold at most {limit} ids, not {len(value)}")
    return tuple(dict.fromkeys(value))


def _parse_stop_token_ids(value: object) -> object:
    return _parse_token_ids(value, "stop_token_ids", MAX_STOP_TOKEN_IDS)


def _parse_allowed_token_ids(value: object) -> object:
    if value == []:
        raise invalid("allowed_token_ids must not be empty: nothing could be answered")
    return _parse_token_ids(value, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)


def _parse_logit_bias(value: object) -> object:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid("logit_bias must be an object of token ids and what is added to their logits")
    if len(value) > MAX_LOGIT_BIAS:
        raise invalid(f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens, not {len(value)}")
    return tuple((_parse_biased_id(key), _parse_bias(key, bias)) for key, bias in value.items())


def _parse_biased_id(key: object) -> int:
    if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
        raise invalid("the names in logit_bias must be token ids, written as numbers")
    if str(int(key)) != key:  # or one id could stand there twice
        raise invalid("the token ids in logit_bias must be written without leading zeros")
    return int(key)


def _parse_bias(key: object, bias: object) -> float:
    if not isinstance(bias, int | float) or isinstance(bias, bool) or not -MAX_BIAS <= bias <= MAX_BIAS:
        raise invalid(f"logit_bias[{key!r}] must be a number from -{MAX_BIAS} to {MAX_BIAS}")
    return float(bias)


def _parse_bad_words(value: object) -> object:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise invalid("bad_words must be a list of strings")
    if len(value) > MAX_BAD_WORDS:
        raise invalid(f"bad_words may hold at most {MAX_BAD_WORDS} strings, not {len(value)}")
    if not all(value):
        raise invalid("a string in bad_words must not be empty")
    if any(len(word.encode()) > MAX_BAD_WORD_BYTES for word in value):
        raise invalid(f"a string in bad_words may take at most {MAX_BAD_WORD_BYTES} bytes")
    return tuple(dict.fromkeys(value))


def _array_schema(item: str, *, max_items: int, or_one: bool = False) -> WithJsonSchema:
    """The description of such a field for OpenAPI; null is absent."""
    array = {"type": "array", "items": {"type": item}, "maxItems": max_items}
    return WithJsonSchema({"anyOf": [*([{"type": item}] if or_one else []), array, {"type": "null"}]})


_BIAS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    "maxProperties": MAX_LOGIT_BIAS,
}

StopStrings = Annotated[
    tuple[str, ...],
    BeforeValidator(_parse_stop),
    _array_schema("string", max_items=MAX_STOP_STRINGS, or_one=True),
]
StopTokenIds = Annotated[
    tuple[int, ...], BeforeValidator(_parse_stop_token_ids), _array_schema("integer", max_items=MAX_STOP_TOKEN_IDS)
]
AllowedTokenIds = Annotated[
    tuple[int, ...],
    BeforeValidator(_parse_allowed_token_ids),
    _array_schema("integer", max_items=MAX_ALLOWED_TOKEN_IDS),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_parse_logit_bias),
    WithJsonSchema({"anyOf": [_BIAS_SCHEMA, {"type": "null"}]}),
]
BadWords = Annotated[
    tuple[str, ...], BeforeValidator(_parse_bad_words), _array_schema("string", max_items=MAX_BAD_WORDS)
]
