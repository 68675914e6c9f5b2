"""How long prompts and answers are, where a person says so: "128", "64-256", "normal:128,32" and the like.

Draws lengths; knows nothing of what they are lengths of.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass


class BadLengths(Exception):
    """A text that describes no lengths; the message is for the person who wrote it."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers of at least 1."""

    text: str  # as it was written
    draw: Callable[[random.Random], int]


_FORMS = "N, A-B (evenly), normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA or exponential:MEAN"


def read_lengths(text: str) -> Lengths:
    """Understand one of N, A-B, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA, exponential:MEAN.

    SIGMA is the standard deviation of the length's natural logarithm.

    Raises:
        BadLengths: it is none of these, or a number is out of range.
    """
    name, colon, rest = text.partition(":")
    try:
        if not colon:
            least, dash, most = text.partition("-")
            return _evenly(text, int(least), int(most) if dash else int(least))
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        raise BadLengths(f"{text!r} describes no lengths: write {_FORMS}.") from None
    if not all(0 < number < 1e9 for number in numbers):
        raise BadLengths(f"The numbers of {text!r} must be more than 0.")
    match name, numbers:
        case "normal", [mean, deviation]:
            return Lengths(text, lambda chance: _whole(chance.gauss(mean, deviation)))
        case "lognormal", [median, sigma]:
            return Lengths(text, lambda chance: _whole(chance.lognormvariate(math.log(median), sigma)))
        case "exponential", [mean]:
            return Lengths(text, lambda chance: _whole(chance.expovariate(1 / mean)))
    raise BadLengths(f"{text!r} describes no lengths: write {_FORMS}.")


def _evenly(text: str, least: int, most: int) -> Lengths:
    if not 1 <= least <= most:
        raise BadLengths(f"{text!r} describes no lengths: they go from 1 up, the least one first.")
    return Lengths(text, lambda chance: chance.randint(least, most))


def _whole(length: float) -> int:
    return max(1, round(length))
