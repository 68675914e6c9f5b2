"""Which replica a request goes to. Routers know what they sent where, and never what a replica has evicted."""

from collections.abc import Sequence
from typing import Protocol

from scheduler.simulate.deployment import RouterName
from scheduler.simulate.traces import Turn

MAX_LOAD_RATIO = 1.5  # of a replica over the least loaded one, beyond which a prefix is not followed
SPARE_LOAD = 4  # requests more than the least loaded one has that are always allowed


class Router(Protocol):
    """Chooses a replica for each request, in the order of their arrival."""

    def choose(self, turn: Turn, loads: Sequence[int]) -> int:
        """The replica's place, given the unfinished requests of each."""


class RoundRobin:
    """One after the other, whatever they have to do."""

    def __init__(self) -> None:
        """Begin with the first."""
        self._next = 0

    def choose(self, turn: Turn, loads: Sequence[int]) -> int:
        """The next one."""
        chosen = self._next % len(loads)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """Whoever has the fewest unfinished requests."""

    def choose(self, turn: Turn, loads: Sequence[int]) -> int:
        """The first of those with the fewest."""
        return min(range(len(loads)), key=lambda place: loads[place])


class PrefixAware:
    """Where the longest prefix was sent before, unless that replica has far more to do than another."""

    def __init__(self, num_replicas: int) -> None:
        """Nothing was sent to any of them."""
        self._runs: list[set[int]] = [set() for _ in range(num_replicas)]

    def choose(self, turn: Turn, loads: Sequence[int]) -> int:
        """The replica with the longest prefix, the least loaded of several."""
        least = min(loads)
        allowed = [place for place, load in enumerate(loads) if load <= MAX_LOAD_RATIO * least + SPARE_LOAD]
        chosen = min(allowed, key=lambda place: (-self._num_known(turn, place), loads[place]))
        self._runs[chosen].update(turn.run_ids)
        return chosen

    def _num_known(self, turn: Turn, place: int) -> int:
        known = self._runs[place]
        return next((number for number, run in enumerate(turn.run_ids) if run not in known), len(turn.run_ids))


def build_router(name: RouterName, num_replicas: int) -> Router:
    """A router of this name that has sent nothing yet."""
    if name == "prefix-aware":
        return PrefixAware(num_replicas)
    return LeastLoaded() if name == "least-loaded" else RoundRobin()
