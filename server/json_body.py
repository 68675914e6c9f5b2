"""What a JSON reader lets pass and a request must not hold: one name twice in an object, of which only one would count.

Readers differ in which one that is, so a proxy that checks a request and a server that answers it may see two different
requests. Knows no field.
"""

import json
from typing import NoReturn

from server.errors import InvalidRequest

_MAX_SHOWN = 64  # characters


def refuse_repeated_names(body: bytes) -> None:
    """Look through a body that has been read as JSON once already, which bounds its depth. Raises InvalidRequest."""
    _DECODER.decode(body.decode("utf-8"))


def _check(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) != len(pairs):
        _refuse(pairs)


def _refuse(pairs: list[tuple[str, object]]) -> NoReturn:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            shown = name[:_MAX_SHOWN]
            raise InvalidRequest(f"The body has {shown} twice in the same object.", shown)
        seen.add(name)
    raise AssertionError("no name is repeated")


# Numbers are read as floats: nobody looks at them, and the digits of an integer may take long.
_DECODER = json.JSONDecoder(object_pairs_hook=_check, parse_int=float, strict=False)
