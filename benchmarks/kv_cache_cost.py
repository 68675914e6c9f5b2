"""What one generated token costs against the length of the context, with the KV cache and without it.

With: a decode step over the paged cache. Without: the whole context is computed again, as one prefill into blocks of
its own. Both go through ModelRunner.execute on a real model, in turns. Needs the extra `bench`; writes
benchmarks/results/kv_cache_cost.json and .png.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from kernels.attention.backend import select_backend
from kernels.model_ops.ops import select_ops
from models.loader import load_model
from models.runner import ModelRunner
from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec
from scheduler.output import KnownRow, NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams
from server.model_store import resolve
from server.tokenizer import load_tokenizer
from tests import data_files

BLOCK_SIZE = 16
SHORTEST = 64
DECODE_STEPS = 8  # timed at each visit of a length
PREFILL_CHUNK = 512  # the server's own budget of a step
GREEDY = SamplingParams(max_tokens=1 + DECODE_STEPS, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Seconds for one more token after a context of `length` tokens, over all rounds."""

    length: int
    median: float
    least: float
    most: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Curve:
    """The cost of a token at each length, and how it grows."""

    costs: tuple[TokenCost, ...]
    total_seconds: tuple[float, ...]  # to generate as many tokens as each length, from the first on
    token_exponent: float  # time per token ~ length ** token_exponent
    total_exponent: float  # the same of the total


def growth_exponent(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of log(seconds) over log(length) by least squares: 0 = constant, 1 = linear, 2 = quadratic."""
    return float(np.polyfit(np.log(lengths), np.log(seconds), deg=1)[0])


def total_seconds(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Time to generate the first `length` tokens, for each length: the integral of the time per token.

    Straight lines between the lengths, two at least; the first one goes on down to a length of 0.
    """
    slope = (seconds[1] - seconds[0]) / (lengths[1] - lengths[0])
    at_zero = max(0.0, seconds[0] - slope * lengths[0])
    totals = [lengths[0] * (at_zero + seconds[0]) / 2]
    for (start, end), (first, last) in zip(pairwise(lengths), pairwise(seconds), strict=True):
        totals.append(totals[-1] + (end - start) * (first + last) / 2)
    return tuple(totals)


def curve(samples: dict[int, list[float]]) -> Curve:
    """The curve through the medians of the seconds measured at each length, shortest length first."""
    costs = tuple(
        TokenCost(length, median(seconds), min(seconds), max(seconds), len(seconds))
        for length, seconds in samples.items()
    )
    lengths, medians = [cost.length for cost in costs], [cost.median for cost in costs]
    totals = total_seconds(lengths, medians)
    return Curve(costs, totals, growth_exponent(lengths, medians), growth_exponent(lengths, totals))


def doubling_lengths(longest: int) -> list[int]:
    """64, 128, 256 ... and `longest`, rounded down to whole blocks, at the end."""
    last = longest // BLOCK_SIZE * BLOCK_SIZE
    lengths: list[int] = []
    while (length := SHORTEST << len(lengths)) < last:
        lengths.append(length)
    return [*lengths, last]


class Bench:
    """One model over one paged cache. Sequences share the blocks of one long text as their prefixes.

    Lengths are whole blocks, so that what a sequence generates goes into blocks of its own.
    """

    def __init__(self, model_path: Path, longest: int, longest_without: int) -> None:
        """Load the model, and reserve blocks for a text, for its recomputation and for generated tokens."""
        device = torch.device("cpu")
        self.backend = select_backend("auto", device)
        ops = select_ops(self.backend.name, device, batch_invariant=False)
        model = load_model(model_path, torch.float32, device, ops, lambda _done, _total: None)
        config = model.config
        self._token_ids = _text(model_path, longest)
        num_blocks = [longest // BLOCK_SIZE, longest_without // BLOCK_SIZE, -(-DECODE_STEPS // BLOCK_SIZE)]
        # In a server that has run for a while the blocks of a sequence lie anywhere.
        block_ids = np.random.default_rng(0).permutation(sum(num_blocks))
        parts = np.split(block_ids, np.cumsum(num_blocks)[:-1])
        self._text_blocks, self._fresh_blocks, self._generated_blocks = (tuple(part.tolist()) for part in parts)
        spec = KVCacheSpec(len(config.layers), config.num_kv_heads, config.head_dim, BLOCK_SIZE, "float32")
        self._runner = ModelRunner(
            model,
            self.backend,
            KVCache(spec, len(block_ids), device),
            max_num_seqs=1,
            max_model_len=config.max_position_embeddings,
        )
        self._last_seq_id = 0

    def fill_cache(self) -> None:
        """Compute the whole text into its blocks, in chunks."""
        length = len(self._token_ids)
        self._first_step(length, 0, min(PREFILL_CHUNK, length), self._text_blocks)
        for start in range(PREFILL_CHUNK, length, PREFILL_CHUNK):
            self._next_step(start, min(PREFILL_CHUNK, length - start))
        self._finish()

    def decode(self, length: int) -> tuple[list[float], int]:
        """Seconds of each of some decode steps after `length` tokens, and the token sampled first."""
        # The first step computes the last token of the context again, as after a prefix hit; the second is like all
        # that follow it in a long generation.
        block_ids = self._text_blocks[: length // BLOCK_SIZE] + self._generated_blocks
        token_id = self._first_step(length, length - 1, 1, block_ids)
        seconds = []
        for position in range(length, length + DECODE_STEPS):
            start = time.perf_counter()
            self._next_step(position, 1)
            seconds.append(time.perf_counter() - start)
        self._finish()
        return seconds, token_id

    def recompute(self, length: int) -> tuple[float, int]:
        """Seconds to compute `length` tokens from nothing and sample the next one, and that token."""
        start = time.perf_counter()
        token_id = self._first_step(length, 0, length, self._fresh_blocks[: length // BLOCK_SIZE])
        seconds = time.perf_counter() - start
        self._finish()
        return seconds, token_id

    def _first_step(self, length: int, num_computed: int, num_new: int, block_ids: tuple[int, ...]) -> int:
        """Start a sequence of the first `length` tokens; the token sampled, or -1 if that takes more steps."""
        self._last_seq_id += 1
        token_ids = self._token_ids[:length]
        row = NewRow(self._last_seq_id, 0, token_ids, length, GREEDY, block_ids, num_computed, num_new)
        (result,) = self._runner.execute(SchedulerOutput((row,))).rows
        return result.token_ids[0] if result.token_ids else -1

    def _next_step(self, num_computed: int, num_new: int) -> None:
        row = KnownRow(self._last_seq_id, (), None, num_computed, num_new)
        self._runner.execute(SchedulerOutput((row,)))

    def _finish(self) -> None:
        self._runner.execute(SchedulerOutput((), finished_seq_ids=(self._last_seq_id,)))


def _text(model_path: Path, num_tokens: int) -> tuple[int, ...]:
    text = "\n\n".join((*data_files.mt_bench_prompts(), *data_files.gsm8k_prompts()))
    token_ids = load_tokenizer(model_path).encode(text)
    if len(token_ids) < num_tokens:
        raise ValueError(f"the text has {len(token_ids)} tokens, not {num_tokens}: give a smaller --longest")
    return tuple(token_ids[:num_tokens])


def measure(
    bench: Bench, lengths: Sequence[int], longest_without: int, rounds: int, progress: Progress
) -> tuple[Curve, Curve, int]:
    """The curves with and without the cache, and how often the two sampled different tokens."""
    with_cache: dict[int, list[float]] = {length: [] for length in lengths}
    without_cache: dict[int, list[float]] = {length: [] for length in lengths if length <= longest_without}
    num_different = 0
    task = progress.add_task("", total=rounds * len(lengths))
    for number in range(1, rounds + 1):
        for length in lengths:
            progress.update(task, description=f"round {number} of {rounds}, {length:,} tokens")
            seconds, token_id = bench.decode(length)
            with_cache[length] += seconds
            if length in without_cache:
                once, other_token_id = bench.recompute(length)
                without_cache[length].append(once)
                num_different += token_id != other_token_id
            progress.advance(task)
    return curve(with_cache), curve(without_cache), num_different


def print_curves(console: Console, with_cache: Curve, without_cache: Curve) -> None:
    """One line per length, then the exponents."""
    table = Table(
        "tokens before it", "with the cache, ms", "without, ms", "without / with", title="One generated token"
    )
    for column in table.columns:
        column.justify = "right"
    without = {cost.length: cost.median for cost in without_cache.costs}
    for cost in with_cache.costs:
        other = without.get(cost.length)
        cells = ("", "") if other is None else (f"{other * 1e3:,.1f}", f"{other / cost.median:,.1f}")
        table.add_row(f"{cost.length:,}", f"{cost.median * 1e3:,.1f}", *cells)
    console.print(table)
    for name, one in (("with the cache", with_cache), ("without the cache", without_cache)):
        console.print(
            f"{name}: time per token grows as length^{one.token_exponent:.2f}, "
            f"time of a whole generation as length^{one.total_exponent:.2f}",
            highlight=False,
        )


def main() -> int:
    """Measure, print, and write the result and its plot."""
    parser = argparse.ArgumentParser(description="Time per generated token with and without the KV cache.")
    parser.add_argument("--model", default="smollm2", help="a name, a .gguf file or a directory (default: smollm2)")
    parser.add_argument("--longest", type=int, default=8128, help="longest context with the cache (default: 8128)")
    parser.add_argument("--longest-without", type=int, default=2048, help="the same without it (default: 2048)")
    parser.add_argument("--rounds", type=int, default=5, help="visits of each length (default: 5)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result and the plot")
    options = parser.parse_args()
    console = Console(stderr=True)
    try:
        from benchmarks.kv_cache_plot import plot
    except ImportError as error:
        console.print(f"{error}. The plot needs the extra `bench`: pip install -e '.\\[bench]'")
        return 1
    facts = machine_facts()
    lengths = doubling_lengths(options.longest)
    model_path = resolve(options.model)
    with console.status(f"Loading {model_path.name} and computing {lengths[-1]:,} tokens"):
        bench = Bench(model_path, lengths[-1], options.longest_without)
        bench.fill_cache()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        with_cache, without_cache, num_different = measure(
            bench, lengths, options.longest_without, options.rounds, progress
        )
    print_curves(console, with_cache, without_cache)
    result = {
        "question": "time per generated token against the length of the context, with and without the KV cache",
        "command": command_line(),
        "machine": facts,
        "model": model_path.name,
        "attention_backend": bench.backend.name,
        "dtype": "float32",
        "torch_threads": torch.get_num_threads(),
        "block_size": BLOCK_SIZE,
        "unit": "seconds",
        "different_tokens": num_different,
        "with_cache": asdict(with_cache),
        "without_cache": asdict(without_cache),
    }
    write_result(options.results / "kv_cache_cost.json", result)
    plot(with_cache, without_cache, f"{model_path.stem}, {facts['cpu']}", options.results / "kv_cache_cost.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
