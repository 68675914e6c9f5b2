"""JSON Schema as a grammar is to see it. Knows what the keywords of a schema hold; no grammar library.

JSON Schema, draft 2020-12: sections 10 and 11 of the core (where schemas stand inside of schemas), section 7 of
validation (formats: an unknown one is an annotation).
"""

from typing import Any

_SCHEMA_KEYWORDS = frozenset(
    (
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    )
)
_LIST_KEYWORDS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAP_KEYWORDS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_FORMATS = frozenset(
    (
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri"),
        *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference"),
        *("uri-template", "uuid"),
    )
)


def without_annotated_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of the same values, without the formats that JSON Schema does not define.

    OpenAPI's `int64`, pydantic's `path` and whatever people make up: they say what a value is for, and forbid none.
    """
    changed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        changed[keyword] = _changed(keyword, value)
    return changed


def _changed(keyword: str, value: Any) -> Any:  # noqa: ANN401 - JSON can hold anything
    if keyword in _SCHEMA_KEYWORDS and isinstance(value, dict):
        return without_annotated_formats(value)
    if keyword in _LIST_KEYWORDS and isinstance(value, list):
        return [without_annotated_formats(item) if isinstance(item, dict) else item for item in value]
    if keyword in _MAP_KEYWORDS and isinstance(value, dict):
        return {
            name: without_annotated_formats(item) if isinstance(item, dict) else item for name, item in value.items()
        }
    return value
