"""What this server takes as JSON inside of a request or an answer: how deep it may be, and how an object is read.

One rule for the arguments of a call whichever way they go: what is handed out as a call, comes back in a history.
Knows no field.
"""

import json
import math
from typing import Any

MAX_DEPTH = 64  # objects and arrays inside one another


def is_within(value: object, depth: int) -> bool:
    """Whether objects and arrays stand at most `depth` deep inside one another; level by level, not by recursion."""
    level = [value]
    for _ in range(depth):
        children: list[object] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
        if not children:
            return True
        level = children
    return not any(isinstance(item, dict | list) for item in level)


def read_object(text: str) -> dict[str, Any]:
    """The JSON object that a text holds. Raises ValueError, which says what the text must be, if it holds none."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except _OutOfRange:
        raise ValueError("must hold no number that is too large for JSON's readers") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("must hold a JSON object")
    if not is_within(value, MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def is_object(text: str) -> bool:
    """Whether a text holds a JSON object that `read_object` takes."""
    try:
        read_object(text)
    except ValueError:
        return False
    return True


_TOO_DEEP = f"must not be nested deeper than {MAX_DEPTH} levels"


class _OutOfRange(ValueError):
    """A number became infinite."""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _OutOfRange
    return number
