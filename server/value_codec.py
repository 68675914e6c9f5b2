"""Objects that are nothing but data, as msgpack and back, for another process of ours that runs the same code.

Dataclasses and pydantic models of our own packages travel by name, with their fields; nothing else does, and no code.
Never pickle. Knows none of them in particular.
"""

import dataclasses
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec
from pydantic import BaseModel

from server.token_ids import TokenIds

_PACKAGES = ("server.", "scheduler.")
_SCALARS = {type(None), bool, int, float, str, bytes}
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1  # what msgpack holds
_COLLECTIONS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class UnknownType(TypeError):
    """A value that does not travel."""


class ValueCodec:
    """Encodes and decodes values. Both ends must share the code and the names of `known`."""

    def __init__(self, known: Mapping[str, object] | None = None) -> None:
        """`known` are objects that both ends have, each its own: only their names travel."""
        self._known = dict(known or {})
        self._names = {id(value): name for name, value in self._known.items()}

    def encode(self, value: object) -> bytes:
        """As msgpack. Raises UnknownType."""
        return msgspec.msgpack.encode(self._tree(value))

    def decode(self, encoded: bytes) -> Any:  # noqa: ANN401
        """What was encoded. Raises UnknownType for a name that is not one of ours."""
        return self._value(msgspec.msgpack.decode(encoded))

    def _tree(self, value: Any) -> object:  # noqa: ANN401
        """Scalars as they are, everything else as a list whose first element says what it is."""
        kind = type(value)
        if kind in _SCALARS:
            return value if kind is not int or _MIN_INT <= value <= _MAX_INT else ["int", str(value)]
        if kind.__name__ in _COLLECTIONS and kind is _COLLECTIONS[kind.__name__]:
            return [kind.__name__, *self._elements(value)]
        if kind is dict:
            return ["dict", [*self._elements(value)], [*self._elements(value.values())]]
        if kind is TokenIds:
            return ["token_ids", value.packed()]
        if id(value) in self._names:
            return ["known", self._names[id(value)]]
        if dataclasses.is_dataclass(value):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        elif isinstance(value, BaseModel):
            state = value.__getstate__()
            fields = [state[name] for name in sorted(state)]
        else:
            raise UnknownType(f"{kind.__qualname__} does not travel between processes")
        return ["object", kind.__module__, kind.__qualname__, *self._elements(fields)]

    def _elements(self, values: Any) -> Any:  # noqa: ANN401
        kinds = set(map(type, values))
        if kinds <= _SCALARS and (kinds.isdisjoint({int}) or (kinds == {int} and _fits(values))):
            return values  # ten thousands of ids or strings, without a turn of Python's for each
        return map(self._tree, values)

    def _value(self, tree: Any) -> Any:  # noqa: ANN401
        if type(tree) is not list:
            return tree
        match tree:
            case ["int", digits]:
                return int(digits)
            case ["dict", keys, values]:
                return dict(zip(map(self._value, keys), map(self._value, values), strict=True))
            case ["token_ids", packed]:
                return TokenIds.unpack(packed)
            case ["known", name]:
                return self._known[name]
            case ["object", module, name, *fields]:
                return _rebuilt(class_named(module, name), [self._value(field) for field in fields])
            case [kind, *elements]:
                if set(map(type, elements)) <= _SCALARS:
                    return _COLLECTIONS[kind](elements)
                return _COLLECTIONS[kind](map(self._value, elements))
        raise UnknownType(f"an empty list is no value: {tree!r}")


def _fits(values: Any) -> bool:  # noqa: ANN401
    return bool(min(values) >= _MIN_INT and max(values) <= _MAX_INT)


def class_named(module: str, name: str) -> type:
    """A class of ours. Raises UnknownType for what is none."""
    if not module.startswith(_PACKAGES):
        raise UnknownType(f"{module} is none of our packages")
    found: Any = sys.modules.get(module) or import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise UnknownType(f"{module}.{name} is no class")
    return found


def _rebuilt(kind: type, fields: list[Any]) -> object:
    """An object with these fields, as it was: nothing is checked or derived again."""
    if not dataclasses.is_dataclass(kind) and not issubclass(kind, BaseModel):
        raise UnknownType(f"{kind.__qualname__} is not a class of data")
    value = object.__new__(kind)
    if issubclass(kind, BaseModel):
        names = sorted(("__dict__", "__pydantic_extra__", "__pydantic_fields_set__", "__pydantic_private__"))
        value.__setstate__(dict(zip(names, fields, strict=True)))
    else:
        for field, content in zip(dataclasses.fields(kind), fields, strict=True):
            object.__setattr__(value, field.name, content)  # a frozen one is not changed: it is not finished yet
    return value
