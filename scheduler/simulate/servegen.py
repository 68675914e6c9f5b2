"""Draws requests as ServeGen's clients send them: each client a stream of its own, bursty as it was measured.

Reads client_rates.csv and client_lengths.jsonl (github.com/alibaba/ServeGen, arXiv:2505.09999). Knows no scheduler.
"""

import csv
import json
import math
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler.simulate.traces import Session, Trace, Turn, UnreadableTrace

WINDOW_SECONDS = 600.0  # of one line of client_rates.csv
DEFAULT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Window:
    """How one client sends for ten minutes: gaps of this distribution, whose mean is 1 / rate."""

    start: float
    rate: float  # requests per second
    fit: str  # Gamma or Weibull
    shape: float

    def gap(self, chance: random.Random) -> float:
        """Seconds to the next request.

        The published scale is not used: for Weibull its mean is not 1 / rate, and the rate is what was counted.
        """
        if self.fit == "Weibull":
            gap, mean = chance.weibullvariate(1.0, self.shape), math.gamma(1 + 1 / self.shape)
        else:
            gap, mean = chance.gammavariate(self.shape, 1.0), self.shape
        return gap / mean / self.rate


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Quantiles of a client's prompt and answer lengths, 0 % to 100 % evenly."""

    start: float
    input_tokens: Sequence[float]
    output_tokens: Sequence[float]


def read_servegen(folder: Path, wanted: str, chance: random.Random, rate: float) -> Trace:
    """Draw the requests of one model's clients from the start of its trace.

    Args:
        folder: where the two files lie.
        wanted: "model" or "model:seconds", as "m-small:600"; without a model the first in the file.
        chance: draws gaps and lengths.
        rate: every client sends so many times as often.

    Raises:
        UnreadableTrace: if there is no such model, or none of its clients' lengths are known.
    """
    model, _, seconds = wanted.partition(":")
    duration = float(seconds or DEFAULT_SECONDS)
    rates = defaultdict(list)
    for row in csv.DictReader((folder / "client_rates.csv").read_text(encoding="utf-8").splitlines()):
        model = model or row["model"]
        if row["model"] == model and float(row["window_start_s"]) < duration:
            window = _Window(
                float(row["window_start_s"]), float(row["rate_rps"]) * rate, row["fit"], float(row["shape"])
            )
            rates[row["client"]].append(window)
    if not rates:
        raise UnreadableTrace(f"{folder} has no rates of a model {model!r} in its first {duration:g} s.")
    lengths = _read_lengths(folder, model)
    unknown = [client for client in rates if client not in lengths]
    if len(unknown) == len(rates):
        raise UnreadableTrace(
            f"{folder} has no lengths of the clients of {model!r} that send in its first {duration:g} s."
        )
    sessions = [
        Session(arrival, (_draw_turn(lengths[client], arrival, chance),))
        for client, windows in rates.items()
        if client in lengths
        for arrival in _arrivals(windows, duration, chance)
    ]
    sessions.sort(key=lambda session: session.start)
    notes = ["drawn from measured rates and lengths; input and output lengths are independent of each other"]
    if unknown:
        notes.append(f"clients {', '.join(unknown)} left out: their lengths are not known")
    return Trace(f"{folder.name}#{model}:{duration:g}", tuple(sessions), notes=tuple(notes))


def _read_lengths(folder: Path, model: str) -> dict[str, list[_Lengths]]:
    lengths = defaultdict(list)
    for line in (folder / "client_lengths.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["model"] == model:
            quantiles = _Lengths(float(row["window_start_s"]), row["input_tokens"], row["output_tokens"])
            lengths[str(row["client"])].append(quantiles)
    for windows in lengths.values():
        windows.sort(key=lambda window: window.start)
    return lengths


def _arrivals(windows: Sequence[_Window], duration: float, chance: random.Random) -> Iterator[float]:
    for window in windows:
        end = min(window.start + WINDOW_SECONDS, duration)
        arrival = window.start + window.gap(chance) * chance.random()  # a window begins somewhere inside of a gap
        while arrival < end:
            yield arrival
            arrival += window.gap(chance)


def _draw_turn(windows: Sequence[_Lengths], arrival: float, chance: random.Random) -> Turn:
    place = bisect_right(windows, arrival, key=lambda window: window.start)
    window = windows[max(0, place - 1)]
    return Turn(_draw_length(window.input_tokens, chance), _draw_length(window.output_tokens, chance))


def _draw_length(quantiles: Sequence[float], chance: random.Random) -> int:
    """A value of the distribution with these quantiles, straight lines between them."""
    place = chance.random() * (len(quantiles) - 1)
    below = int(place)
    length = quantiles[below] + (place - below) * (quantiles[min(below + 1, len(quantiles) - 1)] - quantiles[below])
    return max(1, round(length))
