"""Fits the simulator's model of what a step takes to steps of the real engine, and puts the simulator to the test.

Scheduler, runner and model as the server builds them, without HTTP. Batches of all sizes are timed, the model is
fitted to some and compared with the others; then requests arrive in real time, and the simulator has to say beforehand
how long they take. Runs on any device; writes benchmarks/results/step_cost_model.json, which
`python -m scheduler.simulate --cost-model` reads.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from benchmarks.step_cost_fit import FitQuality, MeasuredStep, fit_steps, quality
from paged_cache.manager import BlockManager
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.simulate.deployment import Deployment
from scheduler.simulate.measurements import Measurements
from scheduler.simulate.replay import Replay, Replayed
from scheduler.simulate.report import Report, build_report
from scheduler.simulate.step_cost import FittedCost, StepWork
from scheduler.simulate.traces import Session, Trace, Turn
from server.engine_builder import DeviceHalf, build_device_half
from server.engine_config import EngineConfig
from server.model_store import resolve

BLOCK_SIZE = 16
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHORTEST_PROMPT = 8
ROUND_TOKENS = 2048  # of all prompts of a round, so that none takes too long
LOAD = 0.7  # of what the simulator takes for the capacity, in the test with arrivals
WARM_UP_STEPS = 3  # of a run, which are not counted


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of the run with arrivals, in seconds."""

    name: str
    measured: float
    simulated: float


class Engine:
    """The engine without its processes: one scheduler and one runner, stepped by whoever calls."""

    def __init__(self, half: DeviceHalf) -> None:
        """Serve with the runner of `half`, whose cache must hold nothing that is still wanted."""
        self._runner = half.runner
        # Random prompts share nothing: a cache of prefixes would only cost its own hashing.
        manager = BlockManager(half.info.num_blocks, half.info.block_size, enable_prefix_caching=False)
        self.scheduler = Scheduler(half.scheduling, manager)

    def step(self, now: Callable[[], float]) -> MeasuredStep | None:
        """Schedule, run and update once; None if no row was there to run."""
        start = time.perf_counter()
        output = self.scheduler.schedule(now())
        result = self._runner.launch(output).result()
        self.updates = self.scheduler.update(output, result, now())
        seconds = time.perf_counter() - start
        return MeasuredStep(StepWork.of(output), seconds) if output.rows else None

    def forget(self) -> None:
        """Tell the runner of the last sequences that have ended."""
        if not self.scheduler.has_unfinished:
            output = self.scheduler.schedule(0.0)
            self.scheduler.update(output, self._runner.launch(output).result(), 0.0)


def make_request(name: str, turn: Turn, arrival: float, vocab_size: int, chance: random.Random) -> Request:
    """Random tokens, and an answer of the length that the turn says."""
    prompt = tuple(chance.randrange(vocab_size) for _ in range(turn.num_prompt_tokens))
    return Request(name, prompt, SamplingParams(max_tokens=turn.num_output_tokens, ignore_eos=True), arrival)


def measure_steps(
    half: DeviceHalf, seconds: float, chance: random.Random, progress: Progress
) -> list[list[MeasuredStep]]:
    """Rounds of steps: each round a batch of sequences that begin together, for as long as `seconds` allow."""
    longest = min(half.info.max_model_len, half.info.num_blocks * BLOCK_SIZE) - 64
    task = progress.add_task("steps", total=seconds)
    rounds: list[list[MeasuredStep]] = []
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < seconds or len(rounds) < len(BATCHES):
        progress.update(task, completed=min(elapsed, seconds))
        size = min(BATCHES[len(rounds) % len(BATCHES)], half.scheduling.max_num_seqs)
        most = max(SHORTEST_PROMPT, min(longest, 2 * ROUND_TOKENS // size))
        engine = Engine(half)
        for number in range(size):
            length = round(math.exp(chance.uniform(math.log(SHORTEST_PROMPT), math.log(most))))
            turn = Turn(length, chance.randint(8, 32))
            engine.scheduler.add(make_request(str(number), turn, 0.0, half.info.vocab_size, chance), 0.0)
        steps = []
        while engine.scheduler.has_unfinished:
            step = engine.step(lambda: 0.0)
            if step is not None:
                steps.append(step)
        engine.forget()
        rounds.append(steps[WARM_UP_STEPS:] if not rounds else steps)
    progress.update(task, completed=seconds)
    return rounds


def arrival_trace(num_requests: int, chance: random.Random) -> Trace:
    """Requests of mixed lengths that all arrive at once; `spread_over` gives them times."""
    sessions = tuple(
        Session(0.0, (Turn(round(math.exp(chance.uniform(math.log(16), math.log(768)))), chance.randint(16, 96)),))
        for _ in range(num_requests)
    )
    return Trace("arrivals", sessions)


def spread_over(trace: Trace, seconds: float, chance: random.Random) -> Trace:
    """The same requests at random times in this many seconds."""
    times = sorted(chance.uniform(0, seconds) for _ in trace.sessions)
    sessions = zip(times, trace.sessions, strict=True)
    return replace(trace, sessions=tuple(replace(session, start=time) for time, session in sessions))


def serve_in_real_time(half: DeviceHalf, trace: Trace, chance: random.Random) -> Measurements:
    """Let the requests arrive at their times, and measure as the simulator does."""
    engine = Engine(half)
    measured = Measurements()
    token_times: dict[str, float] = {}
    arriving = [
        make_request(str(number), session.turns[0], session.start, half.info.vocab_size, chance)
        for number, session in enumerate(trace.sessions)
    ]
    arriving.reverse()
    start = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - start

    while arriving or engine.scheduler.has_unfinished:
        while arriving and arriving[-1].arrival_time <= now():
            engine.scheduler.add(arriving.pop(), now())
        if not engine.scheduler.has_unfinished:
            time.sleep(max(0.0, arriving[-1].arrival_time - now()))
            continue
        engine.step(now)
        step_end = now()
        for update in engine.updates:
            last = token_times.get(update.request_id)
            if last is not None:
                measured.take_gap(step_end - last)
            token_times[update.request_id] = step_end
        for report in engine.scheduler.ledger.take_ended():
            measured.take_end(report)
    engine.forget()
    return measured


def simulated(deployment: Deployment, trace: Trace) -> Report:
    """What the simulator says of the same requests."""
    start = time.perf_counter()
    replayed = Replay(trace, deployment).run()
    return build_report(trace, deployment, replayed, time.perf_counter() - start)


def compare(half: DeviceHalf, model: FittedCost, num_requests: int, chance: random.Random) -> list[Compared]:
    """A run with arrivals, measured and simulated."""
    deployment = Deployment(
        half.scheduling, model, half.info.num_blocks, BLOCK_SIZE, enable_prefix_caching=False, num_steps_ahead=0
    )
    trace = arrival_trace(num_requests, chance)
    trace = spread_over(trace, simulated(deployment, trace).seconds / LOAD, chance)
    report = simulated(deployment, trace)
    measured = serve_in_real_time(half, trace, chance)
    real = build_report(trace, deployment, Replayed(measured, (), is_complete=True), 0.0)
    pairs = [("until the last answer", real.seconds, report.seconds)]
    for name in ("ttft", "inter_token", "end_to_end"):
        times, foretold = getattr(real, name), getattr(report, name)
        pairs.append((f"{name}, mean", times.mean, foretold.mean))
        pairs += [(f"{name}, p{p}", times.percentile(p), foretold.percentile(p)) for p in (50, 90)]
    return [Compared(*pair) for pair in pairs]


def print_result(console: Console, fitted: FitQuality, compared: Sequence[Compared]) -> None:
    """How far off the model and the simulator are."""
    console.print(
        f"Of {fitted.num_steps} steps that the model was not fitted to it is off by {fitted.median_error:.1%} in the "
        f"median, {fitted.p90_error:.1%} at p90; of their sum it foretells {fitted.total_ratio:.1%}."
    )
    table = Table("seconds", "measured", "simulated", "ratio", title=f"Requests that arrive at {LOAD:.0%} of capacity")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in compared:
        ratio = row.simulated / row.measured if row.measured else math.nan
        table.add_row(row.name, f"{row.measured:.4f}", f"{row.simulated:.4f}", f"{ratio:.2f}")
    console.print(table)


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The server's defaults on this device, with as many blocks as are asked for."""
    return EngineConfig(
        model_path=str(resolve(options.model)),
        dtype="auto",
        device=options.device,
        attention_backend="auto",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=options.num_blocks,
        kv_cache_memory=None,
        gpu_memory_utilization=0.9,
        max_model_len=None,
        max_num_seqs=None,
        max_num_batched_tokens=None,
        long_prefill_token_threshold=None,
        cpu_threads=None,
        kv_cache_dtype="auto",
        batch_invariant=False,
        async_scheduling=False,  # each step is timed from its beginning to its tokens
        enforce_eager=False,
        swap_space=options.swap_space,
    )


def main() -> int:
    """Measure, fit, put to the test, and write the result."""
    parser = argparse.ArgumentParser(description="Fits the simulator's model of a step to the real engine.")
    parser.add_argument("--model", default="smollm2", help="name, folder or .gguf (default: smollm2)")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default: the GPU where there is one)")
    parser.add_argument("--num-blocks", type=int, default=2048, help="KV blocks of 16 tokens (default: 2048)")
    parser.add_argument(
        "--swap-space", type=int, default=2**28, help="bytes on the host, to time a swap (default: 2**28)"
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="for which steps are timed (default: 90)")
    parser.add_argument("--requests", type=int, default=60, help="that arrive in the test (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, tokens and arrivals (default: 0)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    facts = machine_facts()
    console = Console(stderr=True)
    chance = random.Random(options.seed)
    half = build_device_half(engine_config(options), lambda _stage, _done, _total: None)
    with Progress(console=console) as progress:
        rounds = measure_steps(half, options.seconds, chance, progress)
    # Every third round is kept back.
    fitted_to = [step for number, steps in enumerate(rounds) for step in steps if number % 3]
    kept_back = [step for number, steps in enumerate(rounds) for step in steps if not number % 3]
    source = f"{Path(options.model).name} on {half.info.device} ({half.info.attention_backend}), {facts['cpu']}"
    model = fit_steps(fitted_to, source, half.scheduling.swap_seconds_per_block)
    fitted = quality(model, kept_back)
    compared = compare(half, model, options.requests, chance)
    print_result(console, fitted, compared)
    result = {
        "question": "what a step of the engine takes, and how well the simulator foretells a run",
        "command": command_line(),
        "machine": facts,
        "engine": msgspec.structs.asdict(half.info),
        "limits": {
            "max_num_seqs": half.scheduling.max_num_seqs,
            "max_num_batched_tokens": half.scheduling.max_num_batched_tokens,
            "long_prefill_token_threshold": half.scheduling.long_prefill_token_threshold,
        },
        "unit": "seconds",
        "num_fitted_steps": len(fitted_to),
        "quality": asdict(fitted),
        "arrivals": [asdict(row) for row in compared],
        "model": model.to_json(),
    }
    write_result(options.results / "step_cost_model.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
