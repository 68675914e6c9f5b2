"""JSON Schema as a grammar is to see it. Knows what the keywords of a schema hold; no grammar library.

JSON Schema, draft 2020-12: sections 10 and 11 of the core (where schemas stand inside of schemas), sections 6 and 7 of
validation (numbers and counts; formats: an unknown one is an annotation).
"""

import math
import re
from typing import Any

# A \u would spell a name in another way than the schema does, which a grammar of texts takes for another name.
JSON_ESCAPES = 'nrbtf\\"'

_LIST_KEYWORDS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAP_KEYWORDS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_CONSTANT_KEYWORDS = ("const", "enum")
_LEAST = ("minimum", "exclusiveMinimum")
_MOST = ("maximum", "exclusiveMaximum")
_ANNOTATIONS = ("default", "examples")
_FORMATS = frozenset(
    (
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri"),
        *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference"),
        *("uri-template", "uuid"),
    )
)
_FARTHEST = 2**63 - 1024  # the largest double that is a 64-bit integer too
_SPELLED_BY_CODE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# Where a value may stand, not in the middle of a text. The library's ranges of integers never end from here on.
_NEGATIVE_VALUE = re.compile(r"[:,\[]\s*+(-\d++(?:\.\d++)?(?:[eE][+-]?\d++)?)")


class SchemaError(ValueError):
    """A schema that cannot be followed exactly; the message names the keyword, without a full stop."""


def grammar_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of the same values, in words that a grammar over doubles and texts does not take for others.

    Left out are the formats that JSON Schema does not define: OpenAPI's `int64`, pydantic's `path` and whatever people
    make up say what a value is for, and forbid none. Bounds that no double holds exactly move inwards to one.

    Raises:
        SchemaError: for constants and counts that would allow what the schema forbids.
    """
    changed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if keyword == "minProperties" and not _counts_more_than_required_names(schema):
            continue
        changed[keyword] = _changed(keyword, value)
    return changed


def holds_endless_range(text: str) -> bool:
    """Whether a text with schemas in it has an integer so far below zero that the library would never end."""
    return any(float(number) <= -_FARTHEST - 1 for number in _NEGATIVE_VALUE.findall(text))


def _changed(keyword: str, value: Any) -> Any:  # noqa: ANN401 - JSON can hold anything
    if isinstance(value, float) and not math.isfinite(value):
        raise SchemaError(f"its {keyword} is a number that JSON does not have")
    if keyword in _CONSTANT_KEYWORDS:
        _check_constant(keyword, value)
        return value
    if keyword in (*_LEAST, *_MOST) and isinstance(value, int | float) and not isinstance(value, bool):
        return _bound(keyword, value)
    if keyword in _LIST_KEYWORDS and isinstance(value, list):
        return [grammar_schema(item) if isinstance(item, dict) else item for item in value]
    if keyword in _MAP_KEYWORDS and isinstance(value, dict):
        return {name: grammar_schema(item) if isinstance(item, dict) else item for name, item in value.items()}
    if keyword not in _ANNOTATIONS and isinstance(value, dict):  # unknown ones too: a $ref may point into them
        return grammar_schema(value)
    return value


def _check_constant(keyword: str, value: Any) -> None:  # noqa: ANN401
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _check_constant(keyword, item)
    elif isinstance(value, str):
        if found := _SPELLED_BY_CODE.search(value):
            raise SchemaError(
                f"its {keyword} holds the control character U+{ord(found[0]):04X}, which is not supported"
            )
    elif isinstance(value, int | float) and not (abs(value) <= _FARTHEST and float(value) == value):
        shown = "an integer" if isinstance(value, int) else "a number"
        raise SchemaError(
            f"its {keyword} holds {shown} that is not exact as a double of 64 bits, which is not supported"
        )


def _bound(keyword: str, value: float) -> float:
    """The nearest double that allows no more than `value`, also after the next integer to it was rounded."""
    sign = 1 if keyword in _LEAST else -1
    least = sign * value
    if not least <= _FARTHEST:
        raise SchemaError(f"its {keyword} leaves no number that is exact as a double of 64 bits")
    least = max(least, -_FARTHEST)
    rounded = float(least)
    if rounded < least or (keyword.startswith("exclusive") and abs(rounded) >= 2**53):
        rounded = math.nextafter(rounded, math.inf)
    return value if rounded == sign * value else sign * (int(rounded) if rounded.is_integer() else rounded)


def _counts_more_than_required_names(schema: dict[str, Any]) -> bool:
    """Whether `minProperties` asks for anything. A grammar counts a name again when it comes again: one more it can do.

    Raises:
        SchemaError: if it asks for more than one name beside the required ones.
    """
    count, names = schema["minProperties"], schema.get("required")
    if not isinstance(count, int | float):
        return True
    num_required = len(set(map(str, names))) if isinstance(names, list) else 0
    if count > num_required + 1:
        raise SchemaError(
            "it uses minProperties for more than one name beside the required ones, which is not supported"
        )
    return not 0 <= count <= num_required
