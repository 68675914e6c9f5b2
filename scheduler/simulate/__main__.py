"""`python -m scheduler.simulate TRACE`: replays a trace, prints what came out, or finds how many replicas it needs."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scheduler.simulate.deployment import Deployment
from scheduler.simulate.options import BadOptions, deployment_of, objective_of, parse, trace_of
from scheduler.simulate.replay import Replay
from scheduler.simulate.report import Report, build_report, latency_table, summary_table
from scheduler.simulate.sizing import Objective, Sizing, Trial, size, try_replicas
from scheduler.simulate.traces import Trace, UnreadableTrace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 1 if no number of replicas met the objective, or 2 for what cannot be simulated."""
    options = parse(arguments)
    console = Console(stderr=options.json is not None and str(options.json) == "-")
    errors = Console(stderr=True)
    try:
        trace = trace_of(options)
        deployment = deployment_of(options, trace)
    except (UnreadableTrace, BadOptions) as error:
        errors.print(str(error), markup=False, soft_wrap=True)
        return 2
    trace = trace.within(deployment.config.max_model_len, deployment.num_blocks * deployment.block_size)
    if not trace.sessions:
        errors.print("No request of the trace fits: raise --max-model-len or --num-blocks.", markup=False)
        return 2
    objective = objective_of(options)
    progress = _progress(errors, is_shown=not options.no_progress)
    with progress:
        if objective is None:
            report = _simulate(trace, deployment, _bar(progress, trace, "requests"))
            result, is_met = report.to_json(), True
        else:
            sizing = _size(trace, deployment, objective, options.max_replicas, progress)
            result, is_met = _sizing_json(sizing), sizing.num_replicas is not None
    if objective is None:
        _print_report(console, report)
    else:
        _print_sizing(console, sizing)
    if options.json is not None:
        _write_json(result, str(options.json))
    return 0 if is_met else 1


def _progress(console: Console, *, is_shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not is_shown or not console.is_terminal, transient=True)


def _bar(progress: Progress, trace: Trace, name: str) -> Callable[[int], None]:
    task = progress.add_task(name, total=trace.num_requests)
    return lambda num_ended: progress.advance(task, num_ended)


def _simulate(trace: Trace, deployment: Deployment, advance: Callable[[int], None]) -> Report:
    start = time.perf_counter()
    replayed = Replay(trace, deployment).run(advance=advance)
    return build_report(trace, deployment, replayed, time.perf_counter() - start)


def _size(trace: Trace, deployment: Deployment, objective: Objective, max_replicas: int, progress: Progress) -> Sizing:
    def attempt(num_replicas: int) -> Trial:
        advance = _bar(progress, trace, f"{num_replicas} replicas")
        return try_replicas(trace, deployment, objective, num_replicas, advance)

    return size(attempt, objective, max_replicas)


def _sizing_json(sizing: Sizing) -> dict[str, Any]:
    chosen = sizing.chosen
    return {
        "objective": {
            "percentile": sizing.objective.percentile,
            "ttft": sizing.objective.ttft,
            "inter_token": sizing.objective.inter_token,
        },
        "num_replicas": sizing.num_replicas,
        "num_cards": None if chosen is None else chosen.num_cards,
        "trials": [
            {
                "num_replicas": trial.num_replicas,
                "is_met": trial.is_met,
                "is_complete": trial.is_complete,
                "report": trial.report.to_json(),
            }
            for trial in sizing.trials
        ],
    }


def _print_report(console: Console, report: Report, percentile: float | None = None) -> None:
    console.print(summary_table(report))
    console.print(latency_table(report, percentile))
    for note in (f"cost: {report.cost}", *report.notes):
        console.print(note, markup=False, soft_wrap=True)


def _print_sizing(console: Console, sizing: Sizing) -> None:
    objective = sizing.objective
    name = f"p{objective.percentile:g}"
    table = Table(
        "replicas", f"first token {name}, s", f"between tokens {name}, s", "hit rate", "within", title="Replicas"
    )
    for trial in sorted(sizing.trials, key=lambda trial: trial.num_replicas):
        report = trial.report
        late = "" if trial.is_complete else "given up: "
        table.add_row(
            str(trial.num_replicas),
            f"{late}{report.ttft.percentile(objective.percentile):.4g}",
            f"{report.inter_token.percentile(objective.percentile):.4g}",
            f"{report.hit_rate:.3f}",
            "yes" if trial.is_met else "no",
        )
    console.print(table)
    chosen = sizing.chosen
    if chosen is None:
        most = max(trial.num_replicas for trial in sizing.trials)
        console.print(f"Not even {most} replicas meet the objective.", markup=False)
        return
    _print_report(console, chosen, objective.percentile)
    console.print(f"Needed: {sizing.num_replicas} replicas, {chosen.num_cards} cards.", markup=False)


def _write_json(result: dict[str, Any], path: str) -> None:
    text = json.dumps(result, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123  # a path that a person gave
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
