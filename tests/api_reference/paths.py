"""The notation of tests/data/openai/fields.json for places in a body: `a.b`, `a[]`, `a[kind]`, `a(kind)`.

A kind is the `type` of an object, or its `role`. Knows no field in particular.
"""

import re
from collections.abc import Iterator
from typing import Any

_STEP = re.compile(r"([\w$]+)|\[\]|\[([^\]]+)\]|\(([^)]+)\)")


def paths_of(body: object, path: str = "") -> Iterator[str]:
    """Every place in a body, in every way that it can be written."""
    if isinstance(body, dict):
        for key, value in body.items():
            inner = f"{path}.{key}" if path else key
            yield inner
            yield from paths_of(value, inner)
            for kind in _kinds(value):
                yield f"{inner}({kind})"
                yield from paths_of(value, f"{inner}({kind})")
    elif isinstance(body, list):
        for item in body:
            yield from paths_of(item, f"{path}[]")
            for kind in _kinds(item):
                yield f"{path}[{kind}]"
                yield from paths_of(item, f"{path}[{kind}]")


def _kinds(value: object) -> list[str]:
    if not isinstance(value, dict):
        return []
    kinds = [value[tag] for tag in ("type", "role") if isinstance(value.get(tag), str)]
    return kinds or (["message"] if "role" in value else [])


def body_with(path: str, value: object) -> Any:
    """The smallest body that has `value` at a place; a place that is a whole kind gets no other field."""
    steps = list(_STEP.finditer(path))
    for index in range(len(steps) - 1, -1, -1):
        key, item_kind, object_kind = steps[index].groups()
        if key is not None:
            value = {key: value}
            continue
        kind = item_kind or object_kind
        if kind is not None:
            tag = "role" if steps[index - 1].group() == "messages" else "type"
            value = {tag: kind.split("|")[0], **(value if isinstance(value, dict) else {})}
        value = value if object_kind is not None else [value]
    return value


def param_of(path: str) -> str:
    """A place in the notation of `param`, in a body that `body_with` made."""
    return re.sub(r"\[[^\]]*\]", "[0]", re.sub(r"\([^)]*\)", "", path))
