"""When requests are due: drawn before the load begins, so that nothing the server does can move them.

Knows no requests and no clock: times are seconds from the start.
"""

import random
from collections.abc import Iterator
from itertools import count, takewhile
from typing import Literal

Process = Literal["poisson", "constant", "gamma"]


def arrivals(process: Process, rate: float, chance: random.Random, burstiness: float = 1.0) -> Iterator[float]:
    """Times of arrivals without end, in order.

    Args:
        process: `poisson`: independent of each other; `constant`: evenly spaced, the first at once; `gamma`: gaps of a
            Gamma distribution.
        rate: arrivals per second, on average.
        chance: draws the gaps.
        burstiness: shape of the Gamma distribution: 1 is Poisson, less is burstier. The gaps' standard deviation is
            their mean over its square root. Other processes do not look at it.
    """
    if process == "constant":
        yield from (number / rate for number in count())
        return
    now = 0.0
    while True:
        if process == "poisson":
            now += chance.expovariate(rate)
        else:
            now += chance.gammavariate(burstiness, 1 / (burstiness * rate))
        yield now


def within(times: Iterator[float], seconds: float) -> Iterator[float]:
    """The times before `seconds`."""
    return takewhile(lambda time: time < seconds, times)
