"""What a token costs after a context of 128 to 8,192 tokens: decoded by itself, and as one of a chunk of a prompt.

With the server's own settings on a real model, through ModelRunner.execute. A straight line is laid through the costs:
attention reads every key before a token, so the cost must grow with the context and not faster. Needs the extra
`bench`; writes benchmarks/results/context_cost.json and .png.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from benchmarks.served_model import ServedModel
from scheduler.sampling_params import SamplingParams
from server.model_store import resolve
from server.tokenizer import load_tokenizer
from tests import data_files

CHUNK = 128  # tokens of a prompt that are computed at once: what a long prompt gets while others wait
SHORTEST = CHUNK
DECODE_STEPS = 8  # timed at each visit of a context
PARAMS = SamplingParams(max_tokens=DECODE_STEPS + 2, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Line:
    """The straight line through costs: seconds per token = at_zero + per_token * context."""

    at_zero: float  # seconds
    per_token: float  # seconds for each token of context
    largest_deviation: float  # of a cost from the line, as a part of the line


@dataclass(frozen=True, slots=True)
class Growth:
    """Median seconds per token after each context, and the line through them."""

    contexts: tuple[int, ...]
    seconds: tuple[float, ...]
    line: Line


def fit_line(contexts: Sequence[int], seconds: Sequence[float]) -> Line:
    """By least squares of relative deviations: short contexts count as much as long ones. Two contexts at least."""
    x, y = np.array(contexts, float), np.array(seconds)
    per_token, at_zero = np.polyfit(x, y, deg=1, w=1 / y)
    line = at_zero + per_token * x
    return Line(float(at_zero), float(per_token), float(np.abs(y / line - 1).max()))


def growth(samples: dict[int, list[float]]) -> Growth:
    """Of the seconds measured after each context."""
    contexts = tuple(samples)
    seconds = tuple(median(found) for found in samples.values())
    return Growth(contexts, seconds, fit_line(contexts, seconds))


def doubling_contexts(longest: int) -> list[int]:
    """128, 256, 512 ... as far as `longest`, which is the last one, rounded down to whole chunks."""
    last = longest // CHUNK * CHUNK
    contexts: list[int] = []
    while (context := SHORTEST << len(contexts)) < last:
        contexts.append(context)
    return [*contexts, last]


class Bench:
    """One long text in the cache. What is measured after a context of it goes into blocks of its own."""

    def __init__(self, model: ServedModel, token_ids: Sequence[int], longest: int) -> None:
        """Compute the first `longest` of the token ids into their blocks.

        Raises:
            ValueError: there are fewer, or contexts are not whole blocks.
        """
        block_size = model.info.block_size
        if len(token_ids) < longest + CHUNK:
            raise ValueError(f"the text has {len(token_ids)} tokens, not {longest + CHUNK}: give a smaller --longest")
        if CHUNK % block_size:
            raise ValueError(f"blocks of {block_size} tokens do not fill a chunk of {CHUNK}")
        self._model = model
        self._token_ids = tuple(token_ids)
        # In a server that has run for a while the blocks of a sequence lie anywhere.
        block_ids = np.random.default_rng(0).permutation((longest + CHUNK) // block_size).tolist()
        self._text_blocks = block_ids[: longest // block_size]
        self._own_blocks = block_ids[longest // block_size :]
        model.start(self._token_ids[:longest], PARAMS, self._text_blocks, 0, CHUNK)
        for start in range(CHUNK, longest, CHUNK):
            model.proceed(start, CHUNK)
        model.finish()

    def decode(self, context: int) -> list[float]:
        """Seconds of each of some decode steps after `context` tokens."""
        # The first step computes the context's last token again, as after a prefix hit, and what it takes is left out.
        self._model.start(self._token_ids[:context], PARAMS, self._blocks(context), context - 1, 1)
        seconds = []
        for position in range(context, context + DECODE_STEPS):
            begin = time.perf_counter()
            self._model.proceed(position, 1)
            seconds.append(time.perf_counter() - begin)
        self._model.finish()
        return seconds

    def prefill(self, context: int) -> float:
        """Seconds per token of the chunk of the text that follows `context` tokens of it."""
        begin = time.perf_counter()
        self._model.start(self._token_ids[: context + CHUNK], PARAMS, self._blocks(context), context, CHUNK)
        seconds = time.perf_counter() - begin
        self._model.finish()
        return seconds / CHUNK

    def _blocks(self, context: int) -> list[int]:
        return [*self._text_blocks[: context // self._model.info.block_size], *self._own_blocks]


def measure(bench: Bench, contexts: Sequence[int], rounds: int, progress: Progress) -> tuple[Growth, Growth]:
    """The costs of decoding and of prefill after each context, in turns."""
    decode: dict[int, list[float]] = {context: [] for context in contexts}
    prefill: dict[int, list[float]] = {context: [] for context in contexts}
    task = progress.add_task("", total=rounds * len(contexts))
    for number in range(1, rounds + 1):
        for context in contexts:
            progress.update(task, description=f"round {number} of {rounds}, {context:,} tokens")
            decode[context] += bench.decode(context)
            prefill[context].append(bench.prefill(context))
            progress.advance(task)
    return growth(decode), growth(prefill)


def print_growth(console: Console, decode: Growth, prefill: Growth) -> None:
    """One line per context, then the two fitted ones."""
    table = Table("tokens before it", "decoded, ms", "of a prompt, µs", title="One token")
    for column in table.columns:
        column.justify = "right"
    for context, decoded, computed in zip(decode.contexts, decode.seconds, prefill.seconds, strict=True):
        table.add_row(f"{context:,}", f"{decoded * 1e3:.2f}", f"{computed * 1e6:.0f}")
    console.print(table)
    for name, line in (("decoded", decode.line), ("of a prompt", prefill.line)):
        console.print(
            f"{name}: {line.at_zero * 1e3:.3f} ms, and {line.per_token * 1e9:,.0f} ns for each token before it; "
            f"{line.largest_deviation:.0%} off at most",
            highlight=False,
        )


def main() -> int:
    """Measure, print, and write the result and its plot."""
    parser = argparse.ArgumentParser(description="Time per token against the length of the context.")
    parser.add_argument("--model", default="smollm2", help="a name, a .gguf file or a directory (default: smollm2)")
    parser.add_argument("--longest", type=int, default=8064, help="longest context (default: 8064)")
    parser.add_argument("--rounds", type=int, default=7, help="visits of each context (default: 7)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result and the plot")
    options = parser.parse_args()
    console = Console(stderr=True)
    try:
        from benchmarks.context_cost_plot import plot
    except ImportError as error:
        console.print(f"{error}. The plot needs the extra `bench`: pip install -e '.\\[bench]'")
        return 1
    facts = machine_facts()
    contexts = doubling_contexts(options.longest)
    path = resolve(options.model)
    with console.status(f"Loading {path.name} and computing {contexts[-1]:,} tokens"):
        text = "\n\n".join((*data_files.mt_bench_prompts(), *data_files.gsm8k_prompts()))
        bench = Bench(ServedModel(path, {}), load_tokenizer(path).encode(text), contexts[-1])
    with Progress(console=console, disable=not console.is_terminal) as progress:
        decode, prefill = measure(bench, contexts, options.rounds, progress)
    print_growth(console, decode, prefill)
    result = {
        "question": "time per token against the length of the context, with the server's settings",
        "command": command_line(),
        "machine": facts,
        "model": path.name,
        "threads": torch.get_num_threads(),
        "chunk_tokens": CHUNK,
        "unit": "seconds per token",
        "decode": asdict(decode),
        "prefill": asdict(prefill),
    }
    write_result(options.results / "context_cost.json", result)
    plot(decode, prefill, f"{path.stem}, {facts['cpu']}", options.results / "context_cost.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
