"""The command line of the simulator, and what it means as a trace and a deployment.

Reads the files that are named; runs nothing.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from scheduler.config import SchedulerConfig
from scheduler.simulate.deployment import Deployment
from scheduler.simulate.hardware import CARDS, MODELS, RooflineCost
from scheduler.simulate.sizing import Objective
from scheduler.simulate.step_cost import NoCost, StepCost, load_fitted_cost
from scheduler.simulate.trace_files import read_trace
from scheduler.simulate.traces import Trace

DEFAULT_BLOCKS = 4096  # where no card says how many fit


class BadOptions(ValueError):
    """Options that do not go together; the message is for the person who gave them."""


def _number(least: float, most: float = math.inf, kind: Callable[[str], float] = float) -> Callable[[str], float]:
    """A reader of numbers in a range, both ends included."""

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least:g} and {most:g}")
        return value

    return read


def _integer(least: int) -> Callable[[str], float]:
    return _number(least, 2**31 - 1, int)


def build_parser() -> argparse.ArgumentParser:
    """All options, in groups."""
    parser = argparse.ArgumentParser(
        prog="python -m scheduler.simulate",
        description="Replays a trace through the real scheduler and KV cache against a model of what a step costs.",
    )
    parser.add_argument(
        "trace",
        type=Path,
        help="Mooncake .jsonl, coding-assistant .jsonl, Azure .csv, or a ServeGen folder#model:seconds",
    )
    _add_trace_options(parser.add_argument_group("trace"))
    _add_engine_options(parser.add_argument_group("engine"))
    _add_cost_options(parser.add_argument_group("cost of a step"))
    _add_fleet_options(parser.add_argument_group("replicas and objective"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="PATH", help='write the report there; "-" = standard output')
    output.add_argument("--no-progress", action="store_true", help="no progress bar")
    return parser


def _add_trace_options(group: argparse._ArgumentGroup) -> None:
    positive = _number(1e-9)
    group.add_argument("--seed", type=int, default=0, help="for whatever is drawn (default: 0)")
    group.add_argument("--first", type=_integer(1), metavar="N", help="only the first N requests or conversations")
    group.add_argument("--until", type=positive, metavar="SECONDS", help="only what starts in the first seconds")
    group.add_argument(
        "--sample", type=_number(1e-9, 1), metavar="SHARE", help="about this share of it, prefixes kept whole"
    )
    group.add_argument("--rate", type=positive, default=1.0, help="requests arrive so many times as fast (default: 1)")
    group.add_argument(
        "--tokens-per-run", type=_integer(1), metavar="N", help="tokens of a shared run: shrinks prompts, keeps sharing"
    )
    group.add_argument("--output-scale", type=positive, default=1.0, help="answers so many times as long (default: 1)")
    group.add_argument(
        "--session-spread",
        type=_number(0),
        default=3600.0,
        metavar="SECONDS",
        help="conversations start within (default: 3600)",
    )


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--block-size", type=_integer(1), default=16, help="tokens of a KV block (default: 16)")
    group.add_argument(
        "--num-blocks", help='KV blocks of a replica, or "unlimited" (default: what fits the card, else 4096)'
    )
    group.add_argument(
        "--num-host-blocks", type=_integer(0), default=0, help="blocks that swapping may use (default: 0)"
    )
    group.add_argument("--max-num-seqs", type=_integer(1), default=256, help="running sequences (default: 256)")
    group.add_argument("--max-num-batched-tokens", type=_integer(1), default=8192, help="of a step (default: 8192)")
    group.add_argument("--max-model-len", type=_integer(1), default=131_072, help="of a sequence (default: 131072)")
    group.add_argument(
        "--long-prefill-token-threshold", type=_integer(0), help="0 = no cap (default: a quarter of a step)"
    )
    group.add_argument("--max-num-queued-reqs", type=_integer(0), default=8192, help="0 = no limit (default: 8192)")
    group.add_argument(
        "--max-num-queued-tokens", type=_integer(0), default=1 << 22, help="0 = no limit (default: 2^22)"
    )
    group.add_argument("--queue-timeout", type=_number(1e-9), metavar="SECONDS", help="of every request")
    group.add_argument("--request-timeout", type=_number(1e-9), metavar="SECONDS", help="its answer included")
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="(default: on)"
    )
    group.add_argument(
        "--async-scheduling", action=argparse.BooleanOptionalAction, default=True, help="one step ahead (default: on)"
    )


def _add_cost_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--card", choices=sorted(CARDS), default="h100", help="by its data sheet (default: h100)")
    group.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b", help="(default: llama-3.1-8b)")
    group.add_argument("--cards-per-replica", type=_integer(1), default=1, help="share a model (default: 1)")
    group.add_argument("--compute-efficiency", type=_number(0.01, 1), default=0.5, help="of the card (default: 0.5)")
    group.add_argument("--memory-efficiency", type=_number(0.01, 1), default=0.8, help="of the card (default: 0.8)")
    group.add_argument("--memory-utilization", type=_number(0.01, 1), default=0.9, help="of the card (default: 0.9)")
    group.add_argument(
        "--cost-model",
        metavar="PATH",
        help='instead of a card: from benchmarks/step_cost_model.py, or "none" = no time',
    )


def _add_fleet_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--replicas", type=_integer(1), default=1, help="(default: 1)")
    group.add_argument(
        "--router",
        choices=("round-robin", "least-loaded", "prefix-aware"),
        default="round-robin",
        help="(default: first)",
    )
    group.add_argument(
        "--slo-ttft", type=_number(0), metavar="SECONDS", help="find the replicas that first tokens need"
    )
    group.add_argument("--slo-itl", type=_number(0), metavar="SECONDS", help="the same for gaps between tokens")
    group.add_argument("--slo-percentile", type=_number(1, 100), default=99.0, help="of the two (default: 99)")
    group.add_argument("--max-replicas", type=_integer(1), default=64, help="to be tried (default: 64)")


def objective_of(options: argparse.Namespace) -> Objective | None:
    """What replicas are to be found for; None = none are."""
    if options.slo_ttft is None and options.slo_itl is None:
        return None
    return Objective(options.slo_percentile, options.slo_ttft, options.slo_itl)


def trace_of(options: argparse.Namespace) -> Trace:
    """Read the trace, and cut and scale it as asked.

    Raises:
        UnreadableTrace: if there is none.
        BadOptions: if nothing is left of it.
    """
    trace = read_trace(options.trace, seed=options.seed, session_spread=options.session_spread, rate=options.rate)
    if options.until is not None:
        trace = trace.until(options.until)
    if options.first is not None:
        trace = trace.first(options.first)
    if options.sample is not None:
        trace = trace.sampled(options.sample, options.seed)
    if not trace.sessions:
        raise BadOptions("Nothing of the trace is left: use larger values for --until, --first or --sample.")
    if options.tokens_per_run is not None and not any(turn.run_ids for turn in trace.turns()):
        raise BadOptions("--tokens-per-run is for traces that know of shared prefixes, which this one does not.")
    return trace.scaled(options.tokens_per_run, options.output_scale)


def deployment_of(options: argparse.Namespace, trace: Trace) -> Deployment:
    """The engine, its cost model and its cache.

    Raises:
        BadOptions: if the model does not fit the card, or a number is none.
    """
    cost = _cost_of(options)
    num_blocks = _num_blocks_of(options, cost, trace)
    threshold = options.long_prefill_token_threshold
    config = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        long_prefill_token_threshold=max(1, options.max_num_batched_tokens // 4) if threshold is None else threshold,
        max_queued_requests=options.max_num_queued_reqs,
        max_queued_tokens=options.max_num_queued_tokens,
        swap_seconds_per_block=cost.seconds_per_swapped_block,
        recompute_seconds_per_token=cost.seconds_per_prefill_token,
    )
    return Deployment(
        config,
        cost,
        num_blocks,
        options.block_size,
        options.num_host_blocks,
        options.enable_prefix_caching,
        num_steps_ahead=int(options.async_scheduling),
        num_replicas=options.replicas,
        num_cards=options.cards_per_replica,
        router=options.router,
        queue_timeout=options.queue_timeout,
        timeout=options.request_timeout,
    )


def _cost_of(options: argparse.Namespace) -> StepCost:
    if options.cost_model == "none":
        return NoCost()
    if options.cost_model is not None:
        try:
            return load_fitted_cost(Path(options.cost_model))
        except ValueError as error:
            raise BadOptions(str(error)) from None
    return RooflineCost(
        CARDS[options.card],
        MODELS[options.model],
        options.block_size,
        options.cards_per_replica,
        options.compute_efficiency,
        options.memory_efficiency,
    )


def _num_blocks_of(options: argparse.Namespace, cost: StepCost, trace: Trace) -> int:
    if options.num_blocks == "unlimited":
        return trace.num_blocks_for_all(options.block_size)
    if options.num_blocks is not None:
        if not options.num_blocks.isascii() or not options.num_blocks.isdigit() or int(options.num_blocks) < 1:
            raise BadOptions(f'--num-blocks takes a number of 1 or more or "unlimited", not {options.num_blocks!r}.')
        return int(options.num_blocks)
    if not isinstance(cost, RooflineCost):
        return DEFAULT_BLOCKS
    num_blocks = cost.num_blocks(options.memory_utilization)
    if num_blocks < 1:
        raise BadOptions(
            f"{options.model} does not fit {options.cards_per_replica} x {options.card}: raise --cards-per-replica."
        )
    return num_blocks


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from the command line unless given."""
    return build_parser().parse_args(arguments)
