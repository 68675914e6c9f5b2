"""Requests with the lengths of the PagedAttention paper's two data sets, which arrive as a Poisson process.

The paper (section 6.1, Figure 11) gives mean lengths and histograms; the data sets themselves are not here. Lengths are
drawn from log-normal distributions of those means, cut to what the model takes. Knows no server.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from statistics import NormalDist, fmean

MAX_MODEL_LEN = 2048  # of the paper's models
NUM_SLOTS = 15_728  # of KV cache: 12 GiB of 800 KiB each, OPT-13B on a card of 40 GB (section 3 and Figure 1)
_NORMAL = NormalDist()
_NUM_QUANTILES = 500  # of a distribution, to compute its mean from


@dataclass(frozen=True, slots=True)
class Job:
    """One request, whose answer is as long as it says."""

    arrival: float  # seconds
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts: log-normal with this spread, cut off at `most`, at least 1, of the mean that is asked for."""

    mean: float
    sigma: float
    most: int

    def quantiles(self, count: int) -> list[int]:
        """`count` lengths that stand for the distribution, shortest first: the middles of equal shares."""
        return self._at([(i + 0.5) / count for i in range(count)])

    def draw(self, count: int, chance: random.Random) -> list[int]:
        """Lengths in random order, with the distribution's own mean and spread but for rounding: one of each share."""
        lengths = self._at([(i + chance.random()) / count for i in range(count)])
        chance.shuffle(lengths)
        return lengths

    def _at(self, shares: Sequence[float]) -> list[int]:
        """The lengths that these shares of all do not exceed."""
        median = self._median()
        return [
            min(max(1, round(median * exp(self.sigma * _NORMAL.inv_cdf(max(share, 1e-9))))), self.most)
            for share in shares
        ]

    def _median(self) -> float:
        """By bisection: what is cut off at the end must be made up for."""
        shape = [exp(self.sigma * _NORMAL.inv_cdf((i + 0.5) / _NUM_QUANTILES)) for i in range(_NUM_QUANTILES)]
        low, high = 0.0, float(self.most)
        for _ in range(30):
            middle = (low + high) / 2
            if fmean(min(max(1.0, middle * each), self.most) for each in shape) < self.mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2


@dataclass(frozen=True, slots=True)
class DataSet:
    """The lengths of a data set."""

    name: str
    prompts: Lengths
    outputs: Lengths

    def jobs(self, count: int, rate: float | None, seed: int) -> list[Job]:
        """`count` requests in the order of their arrival.

        Args:
            count: at least 1.
            rate: requests per second; None = all arrive at once.
            seed: the same one gives the same lengths, and gaps that differ by the rate alone.
        """
        chance = random.Random(seed)
        lengths = zip(self.prompts.draw(count, chance), self.outputs.draw(count, chance), strict=True)
        now = 0.0
        jobs = []
        for num_prompt_tokens, num_output_tokens in lengths:
            now += 0.0 if rate is None else chance.expovariate(rate)
            jobs.append(Job(now, num_prompt_tokens, num_output_tokens))
        return jobs

    def typical_jobs(self, count: int, seed: int) -> list[Job]:
        """A few requests that stand for all: quantiles of both lengths, paired at random, all there at once."""
        prompts, outputs = self.prompts.quantiles(count), self.outputs.quantiles(count)
        random.Random(seed).shuffle(prompts)
        return [Job(0.0, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


# Means: Figure 11 of the paper. The spreads are ours: conversations vary by more than instructions do.
SHAREGPT = DataSet("ShareGPT", Lengths(161.31, 1.0, MAX_MODEL_LEN // 2), Lengths(337.99, 0.9, MAX_MODEL_LEN // 2))
ALPACA = DataSet("Alpaca", Lengths(19.31, 0.5, MAX_MODEL_LEN // 2), Lengths(58.45, 0.9, MAX_MODEL_LEN // 2))
DATA_SETS = (SHAREGPT, ALPACA)


def mean_lengths(jobs: Sequence[Job]) -> tuple[float, float]:
    """Mean prompt and mean answer, in tokens."""
    return fmean(job.num_prompt_tokens for job in jobs), fmean(job.num_output_tokens for job in jobs)
