"""Finds the fastest tile of the attention kernels for each kind of layer on this card, and writes them down.

    python benchmarks/tune_kernels.py [--minutes 10] [--dry-run]

The winners go into kernels/attention/tuned_tiles.json (or $OUT/tuned_tiles.json) as each is found, so a run that is
stopped is taken up by the next. The server reads the table and never tunes.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path
from statistics import mean

import torch

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_part import card_facts, repair_interpreter
from benchmarks.gpu_timing import Timer, make_timer
from benchmarks.tune_candidates import (
    Batch,
    Compiled,
    Compilers,
    Job,
    attend,
    backend_with,
    batches,
    candidates,
    jobs,
    row_of,
)
from kernels.attention.triton_backend import arch_of
from kernels.attention.tuning import TUNED_TILES, TileConfig, TileTable
from tests.kernels.paged_batches import relative_error

SECONDS_PER_TIMING = 0.05
ALLOWED_ERROR = 1e-2  # between two tiles, in bfloat16
COMPILED = "compiled"  # the source of a row that was never measured
DRY_JOBS, DRY_CANDIDATES = 3, 2


@dataclass(frozen=True, slots=True)
class Winner:
    """The best candidate of a job, against what the table had before."""

    config: TileConfig
    milliseconds: float  # geometric mean over the batches
    over_before: float


class Tuner:
    """Compiles the candidates of a job side by side, then times them one by one."""

    def __init__(self, device: torch.device, timer: Timer, table: TileTable, compilers: Compilers) -> None:
        """Start from `table`, which the caller may replace as winners are found."""
        self.device = device
        self.table = table
        self._timer = timer
        self._compilers = compilers

    def tune(self, job: Job, configs: Sequence[TileConfig], is_small: bool) -> Winner | None:
        """The fastest candidate that compiles, does not spill, and gives what the table's tile gives; None if none."""
        compiled = self._compilers.compile_all(job, configs)
        usable = [one.config for one in compiled if one.error is None and one.num_spills == 0]
        _report_skipped(compiled)
        timed_on = batches(job, self.device, is_small=is_small)
        before = backend_with(job, None, self.table, self.device)
        expected = [attend(before, batch).double() for batch in timed_on]
        seconds_before = self._seconds(job, None, timed_on)
        best: tuple[float, TileConfig] | None = None
        for number, config in enumerate(usable, start=1):
            _progress(f"  timing {number} of {len(usable)}: {config}")
            backend = backend_with(job, config, self.table, self.device)
            errors = [relative_error(attend(backend, b), e) for b, e in zip(timed_on, expected, strict=True)]
            if not max(errors) < ALLOWED_ERROR:
                print(f"  WRONG by {max(errors):.3g}: {config}", flush=True)
                continue
            seconds = self._seconds(job, config, timed_on)
            if best is None or seconds < best[0]:
                best = (seconds, config)
        if best is None:
            return None
        return Winner(best[1], best[0] * 1e3, best[0] / seconds_before)

    def _seconds(self, job: Job, config: TileConfig | None, timed_on: Sequence[Batch]) -> float:
        """Geometric mean over the batches, so that a long one counts for no more than a short one."""
        backend = backend_with(job, config, self.table, self.device)
        medians = [
            self._timer.time(lambda b=batch: attend(backend, b), max_seconds=SECONDS_PER_TIMING).median
            for batch in timed_on
        ]
        return exp(mean(map(log, medians)))


def tune_all(tuner: Tuner, output: Path, source: str, deadline: float, again: bool, is_dry: bool) -> list[str]:
    """Every job that time allows; the lines of the final table."""
    lines = []
    todo = list(jobs())
    if is_dry:
        todo = [replace(job, layer=replace(job.layer, num_kv_heads=1)) for job in todo[:DRY_JOBS]]
    tuned = {
        (r.head_dim, r.group_size, r.kv_dtype, r.kind) for r in tuner.table.rows if r.arch == arch_of(tuner.device)
    }
    for number, job in enumerate(todo, start=1):
        key = (job.layer.head_dim, job.layer.group_size, job.layer.kv_dtype, job.kind)
        if key in tuned and not again:
            print(f"{number}/{len(todo)} {job.name}: tuned before", flush=True)
            continue
        if time.monotonic() > deadline:
            print(f"{number}/{len(todo)} {job.name} and what follows: no time left; run it again to go on", flush=True)
            break
        configs = candidates(job)
        print(f"{number}/{len(todo)} {job.name}: {len(configs)} candidates", flush=True)
        try:
            winner = tuner.tune(job, configs[:DRY_CANDIDATES] if is_dry else configs, is_dry)
        except Exception:  # any: out of memory or a broken kernel in one job leaves the others worth having
            traceback.print_exc()
            winner = None
        if winner is None:
            lines.append(f"| {job.name} | none can run | | |")
            continue
        c = winner.config
        tuner.table = tuner.table.with_row(row_of(job, c, tuner.device, source))
        tuner.table.save(output)
        tile = f"{c.query_rows} x {c.keys}, {c.num_warps} warps, {c.num_stages} stages"
        lines.append(f"| {job.name} | {tile} | {winner.milliseconds:.4g} | {winner.over_before:.3f} |")
        print(f"  {tile}: {winner.milliseconds:.4g} ms, {winner.over_before:.3f} of before", flush=True)
    return lines


def default_output() -> Path:
    """The package's own table, unless the results are to go elsewhere."""
    return Path(os.environ["OUT"]) / TUNED_TILES.name if os.environ.get("OUT") else TUNED_TILES


def _report_skipped(compiled: Sequence[Compiled]) -> None:
    spilled = sum(one.num_spills > 0 for one in compiled)
    failed = [one for one in compiled if one.error is not None]
    print(f"  {len(compiled) - spilled - len(failed)} usable, {spilled} spill, {len(failed)} cannot run", flush=True)
    for error in sorted({str(one.error) for one in failed}):
        print(f"    {error}", flush=True)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<110}", end="", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Tune what time allows and print the winners."""
    parser = argparse.ArgumentParser(description="Find the fastest tiles of the attention kernels on this card.")
    parser.add_argument("--minutes", type=float, default=10.0, help="start nothing after so long (default: 10)")
    parser.add_argument("--output", type=Path, default=default_output(), help="the table to add the winners to")
    parser.add_argument("--again", action="store_true", help="also what is in the table for this card already")
    parser.add_argument("--dry-run", action="store_true", help="two tiny candidates on the CPU, TRITON_INTERPRET=1")
    options = parser.parse_args(argv)
    if options.dry_run:
        repair_interpreter()
        if options.output == TUNED_TILES:
            print("a dry run needs an --output of its own: its winners mean nothing", file=sys.stderr)
            return 2
    elif not torch.cuda.is_available():
        print("torch sees no CUDA device. Use --dry-run to run the code without one.", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * options.minutes
    device = torch.device("cpu" if options.dry_run else "cuda:0")
    table = TileTable.load(options.output if options.output.exists() else TUNED_TILES)
    source = f"{card_facts(device)['name']}, {datetime.now(UTC):%Y-%m-%d}"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with closing(Compilers(device)) as compilers:
        tuner = Tuner(device, make_timer(device), table, compilers)
        lines = tune_all(tuner, options.output, source, deadline, options.again, options.dry_run)
    print("\n| | tile | ms | of before |\n|---|---|---|---|")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
