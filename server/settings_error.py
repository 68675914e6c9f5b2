"""What is said of a setting that cannot be used: one sentence for a person. Knows no setting by name."""

import difflib

from pydantic_core import ErrorDetails


class SettingsError(Exception):
    """A setting that cannot be used: one sentence for a person."""


def suggestion(name: str, known: list[str]) -> str:
    """A clause with the known name that is most like an unknown one, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else "."


def sentence_of(name: str, details: ErrorDetails, *, secret: bool, value: object) -> str:
    """What pydantic found wrong with the setting `name`; a secret `value` is not shown."""
    message = details["msg"].removeprefix("Value error, ")
    for lead in ("Input should be ", "String should be ", "should be "):
        if message.startswith(lead):
            message = "must be " + message.removeprefix(lead)
    if details["type"] == "string_too_short":
        message = "must not be empty"
    message = message.split(", unable to parse")[0]
    shown = "" if secret or message == "must not be empty" else f", not {value!r}"
    if not message.startswith(("must", "takes")):
        return f"{name}: {message}{shown}."
    return f"{name} {message}{shown}."
