"""What the prefix cache finds of whole traces when it never has to evict: the shares that follow from the traces.

The simulator with an unlimited cache and steps that take no time, against a count of the traces' own ids. Takes the
folder with mooncake/ and coding_assistant/; writes benchmarks/results/trace_hit_rates.json.
"""

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from scheduler.config import SchedulerConfig
from scheduler.simulate.deployment import Deployment
from scheduler.simulate.replay import Replay
from scheduler.simulate.report import build_report
from scheduler.simulate.step_cost import NoCost
from scheduler.simulate.trace_files import read_trace

TRACES = ("mooncake/conversation_trace.jsonl", "mooncake/synthetic_trace.jsonl", "coding_assistant/requests.jsonl")
MAX_MODEL_LEN = 262_144  # no request is left out
BLOCK_SIZE = 64  # divides the traces' runs; smaller blocks find what is left of a prompt's last run too


@dataclass(frozen=True, slots=True)
class HitRate:
    """Shares of a trace's prompt tokens."""

    trace: str
    num_requests: int
    num_prompt_tokens: int
    found: float  # by the cache
    repeated: float  # counted from the ids: whole blocks of them
    seconds: float  # that the simulation took


def measure(path: Path, progress: Progress) -> HitRate:
    """Replay one trace, a token for each answer: answers are found by no prompt of these traces."""
    trace = read_trace(path).scaled(output_scale=1e-9)
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=MAX_MODEL_LEN)
    deployment = Deployment(config, NoCost(), trace.num_blocks_for_all(BLOCK_SIZE), BLOCK_SIZE, num_steps_ahead=0)
    task = progress.add_task(path.stem, total=trace.num_requests)
    start = time.perf_counter()
    replayed = Replay(trace, deployment).run(advance=lambda num_ended: progress.advance(task, num_ended))
    seconds = time.perf_counter() - start
    report = build_report(trace, deployment, replayed, seconds)
    assert (report.num_answered, report.num_evicted_blocks) == (trace.num_requests, 0)
    return HitRate(
        str(path.relative_to(path.parents[1])),
        trace.num_requests,
        trace.num_prompt_tokens,
        report.hit_rate,
        report.hit_rate_limit,
        seconds,
    )


def main() -> int:
    """Replay, print, and write the result; 1 if the cache found another share than the ids say."""
    parser = argparse.ArgumentParser(description="Hit rates of whole traces with an unlimited prefix cache.")
    parser.add_argument("data", type=Path, help="folder with the traces")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    console = Console(stderr=True)
    facts = machine_facts()
    with Progress(console=console) as progress:
        rates = [measure(options.data / name, progress) for name in TRACES]
    table = Table("trace", "requests", "prompt tokens", "found", "repeated", "seconds", title="Unlimited prefix cache")
    for rate in rates:
        table.add_row(
            rate.trace,
            f"{rate.num_requests:,}",
            f"{rate.num_prompt_tokens:,}",
            f"{rate.found:.4f}",
            f"{rate.repeated:.4f}",
            f"{rate.seconds:.1f}",
        )
    console.print(table)
    result = {
        "question": "what share of the traces' prompt tokens an unlimited prefix cache finds",
        "command": command_line([sys.argv[0], "DATA"]),  # wherever the traces lie
        "machine": facts,
        "block_size": BLOCK_SIZE,
        "rates": [asdict(rate) for rate in rates],
    }
    write_result(options.results / "trace_hit_rates.json", result)
    return 0 if all(rate.found == rate.repeated for rate in rates) else 1


if __name__ == "__main__":
    sys.exit(main())
