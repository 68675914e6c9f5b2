"""From the rounds of peers.py to what is reported: medians, ratios round by round, goals. Knows no server's flags."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.baseline import Figures
from benchmarks.peer_loads import Point, RoundResult
from benchmarks.peer_servers import OCTAVO

SPEED_GOALS = {1: 1.4, 8: 2.5, 32: 2.2}  # clients -> times the output tokens/s of the best peer, at least
FIRST_TOKEN_GOAL = 0.6  # times the best peer's time to first token, at most
FIGURES: tuple[str, ...] = tuple(Figures.__slots__)
_SPEED = "output_tokens_per_second"


@dataclass(frozen=True, slots=True)
class PointResult:
    """All rounds of one load; each maps a server's name to what it came to."""

    point: Point
    rounds: tuple[dict[str, RoundResult], ...]


def median_of(results: Sequence[RoundResult], number: Callable[[RoundResult], float | None]) -> float | None:
    """The median of a number over the rounds that have it; None where none has."""
    numbers = [value for value in map(number, results) if value is not None]
    return median(numbers) if numbers else None


def figure(name: str) -> Callable[[RoundResult], float | None]:
    """Reads one of FIGURES from a round."""
    return lambda result: None if result.figures is None else getattr(result.figures, name)


def of_server(result: PointResult, server: str) -> list[RoundResult]:
    """The rounds of one server."""
    return [by_server[server] for by_server in result.rounds if server in by_server]


def ratio(result: PointResult, peer: str, name: str) -> float | None:
    """The median over rounds of ours / the peer's, of one of FIGURES; None: in no round did both answer."""
    read = figure(name)
    ratios = []
    for by_server in result.rounds:
        if OCTAVO in by_server and peer in by_server:
            ours, theirs = read(by_server[OCTAVO]), read(by_server[peer])
            if ours is not None and theirs:
                ratios.append(ours / theirs)
    return median(ratios) if ratios else None


def summary(result: PointResult, peers: Sequence[str]) -> dict[str, Any]:
    """Ratios against each peer and against the best one for each figure, beside the goals."""
    against = {peer: {name: ratio(result, peer, name) for name in FIGURES} for peer in peers}
    best: dict[str, float | None] = {}
    for name in FIGURES:
        known = [of_peer[name] for of_peer in against.values() if of_peer[name] is not None]
        # The best peer is the one that we look worst beside.
        best[name] = (min if name == _SPEED else max)(known) if known else None
    speed_goal = SPEED_GOALS.get(result.point.num_clients)
    return {
        "ratios": against,
        "against_best": best,
        "speed_goal": speed_goal,
        "speed_reached": _reached(best[_SPEED], speed_goal, at_least=True),
        "first_token_goal": FIRST_TOKEN_GOAL,
        "first_token_reached": _reached(best["ttft_p50"], FIRST_TOKEN_GOAL, at_least=False),
    }


def _reached(value: float | None, goal: float | None, *, at_least: bool) -> bool | None:
    if value is None or goal is None:
        return None
    return value >= goal if at_least else value <= goal


def medians(results: Sequence[RoundResult]) -> dict[str, Any]:
    """One server's medians over its rounds, and its errors of all rounds."""
    errors: dict[str, int] = {}
    for result in results:
        for message, count in result.errors.items():
            errors[message] = errors.get(message, 0) + count
    return {
        **{name: median_of(results, figure(name)) for name in FIGURES},
        "prompt_tokens": median_of(results, lambda result: result.num_prompt_tokens or None),
        "cached_tokens": median_of(results, lambda result: result.num_cached_tokens),
        "client_processors": median_of(results, lambda result: result.client_processors),
        "server_seconds_per_token": median_of(results, lambda result: result.server_seconds_per_token),
        "errors": errors,
    }
