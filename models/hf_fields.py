"""Typed, checked access to a JSON object of a Hugging Face directory. Every complaint names the file and the field.

Knows JSON only, no model families.
"""

import json
import math
from pathlib import Path
from typing import Any

from models.errors import CheckpointError, ModelError


class Fields:
    """One JSON object. A field that is absent or null takes the default; without a default it is an error."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        """Wrap `values`; `where` is how messages name the object, such as "config.json"."""
        self._values = values
        self.where = where

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Read a JSON file that holds one object. Raises CheckpointError."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent} has no {path.name}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} does not hold a JSON object")
        return cls(values, path.name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:  # noqa: ANN401 - JSON can hold anything
        """The field as it stands, None where absent."""
        return self._values.get(name)

    def section(self, name: str) -> "Fields":
        """A nested object; an empty one where absent."""
        value = self.raw(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.where}: {name}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number, not a boolean."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(name, "a finite number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(name, default)
        if value <= 0:
            raise self.wrong(name, "a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def strings(self, name: str) -> list[str]:
        """A list of strings; empty where absent."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where absent."""
        value = self._value(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise self.wrong(name, "a token id or a list of token ids")
        return tuple(ids)

    def wrong(self, name: str, expected: str) -> ModelError:
        """The error for a field whose value is not `expected`."""
        return ModelError(f"{self.where}: {name} is {self.raw(name)!r}; it must be {expected}")

    def _value(self, name: str, default: Any) -> Any:  # noqa: ANN401 - checked by the caller
        value = self.raw(name)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.where} has no {name}")
        return default
