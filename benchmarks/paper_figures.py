"""The paper's figures that are simulated: memory, requests in the batch, throughput, block sizes, preemption.

One run of a server after another over the same requests; what comes out are plain values. Draws and prints nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.paper_servers import RESERVATIONS, Served, serve_contiguous, serve_paged, serve_statically
from benchmarks.paper_workloads import ALPACA, DATA_SETS, MAX_MODEL_LEN, NUM_SLOTS, SHAREGPT, DataSet, Job, mean_lengths
from scheduler.config import SchedulerConfig
from scheduler.simulate.deployment import Deployment
from scheduler.simulate.hardware import Card, ModelShape, RooflineCost
from scheduler.simulate.step_cost import FittedCost, StepCost

BLOCK_SIZE = 16
# The paper's first setting: data sheet of the A100 40GB SXM, and OPT-13B.
PAPER_CARD = Card("a100-40gb", 40e9, 1.555e12, 312e12, 25e9)
PAPER_MODEL = ModelShape("opt-13b", 13.0e9, 40, 40, 40, 128)
PAPER_RATES = {SHAREGPT.name: 2.0, ALPACA.name: 30.0}  # of Figure 13
LATENCY_FACTOR = 5  # the latency that is allowed, in those of a request that has the engine to itself
SERVERS = ("paged", *RESERVATIONS, "static")
_NUM_SATURATING = {SHAREGPT.name: 400, ALPACA.name: 3000}  # requests that keep the cache full for long
_NUM_ARRIVING = {SHAREGPT.name: 1000, ALPACA.name: 2500}
_MOST_RATE = 1000.0  # requests per second that are tried
_BISECTIONS = 5  # of a factor of two: to 2 %

Serve = Callable[[Sequence[Job]], Served]


@dataclass(frozen=True, slots=True)
class Setting:
    """A cost of steps, and the limits that go with it."""

    name: str
    cost: StepCost
    max_num_seqs: int
    max_num_batched_tokens: int
    num_steps_ahead: int

    def deployment(self, block_size: int = BLOCK_SIZE) -> Deployment:
        """Our engine with the paper's number of slots. The prompts have nothing in common, so none is looked up."""
        config = SchedulerConfig(self.max_num_seqs, self.max_num_batched_tokens, MAX_MODEL_LEN)
        return Deployment(
            config,
            self.cost,
            NUM_SLOTS // block_size,
            block_size,
            enable_prefix_caching=False,
            num_steps_ahead=self.num_steps_ahead,
        )

    def server(self, name: str, *, while_waiting: bool = False) -> Serve:
        """One of `SERVERS`."""
        if name == "paged":
            return partial(serve_paged, deployment=self.deployment(), while_waiting=while_waiting)
        if name == "static":
            return partial(serve_statically, cost=self.cost, num_slots=NUM_SLOTS)
        return partial(
            serve_contiguous,
            cost=self.cost,
            reservation=name,
            num_slots=NUM_SLOTS,
            max_num_seqs=self.max_num_seqs,
            while_waiting=while_waiting,
        )


def paper_setting() -> Setting:
    """A roofline of the paper's card and model, with as many requests as the memory allows."""
    return Setting("paper's card", RooflineCost(PAPER_CARD, PAPER_MODEL, BLOCK_SIZE), 1024, 2048, 1)


def measured_setting(cost: FittedCost) -> Setting:
    """This machine, by steps measured on it, with the server's defaults on a CPU."""
    return Setting("this machine", cost, 64, 512, 0)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a server fills the KV cache with while requests wait for room; and its batch at the paper's rate."""

    data_set: str
    server: str
    shares: dict[str, float]  # of all slots
    token_share_of_reserved: float
    mean_rows: float
    rate: float
    mean_rows_at_rate: float


def memory_use(setting: Setting, advance: Callable[[int], None]) -> list[MemoryUse]:
    """Every server on both data sets (Figures 2 and 13)."""
    uses = []
    for data_set in DATA_SETS:
        full = data_set.jobs(_NUM_SATURATING[data_set.name], None, seed=1)
        rate = PAPER_RATES[data_set.name]
        arriving = data_set.jobs(_NUM_ARRIVING[data_set.name], rate, seed=0)
        for name in SERVERS:
            served = setting.server(name, while_waiting=True)(full)
            at_rate = setting.server(name)(arriving)
            share = served.token_share_of_reserved
            uses.append(MemoryUse(data_set.name, name, served.shares, share, served.mean_rows, rate, at_rate.mean_rows))
            advance(1)
    return uses


@dataclass(frozen=True, slots=True)
class Throughput:
    """The most that a server takes within the latency that is allowed."""

    setting: str
    data_set: str
    server: str
    latency_limit: float  # mean seconds per generated token
    rate: float  # requests per second
    mean_rows: float  # at that rate
    curve: tuple[tuple[float, float], ...]  # (requests per second, latency), what was tried


def throughputs(setting: Setting, advance: Callable[[int], None]) -> list[Throughput]:
    """Every server on both data sets at equal latency (Figure 12)."""
    results = []
    for data_set in DATA_SETS:
        alone = [Job(0.0, *(round(mean) for mean in mean_lengths(data_set.jobs(1000, None, seed=0))))]
        limit = LATENCY_FACTOR * setting.server("paged")(alone).normalised_latency
        lower = 0.02
        for name in reversed(SERVERS):  # about in the order of what they take: each begins where the last one ended
            result = _capacity(setting, data_set, name, limit, lower)
            lower = max(0.5 * result.rate, 0.02)
            results.append(result)
            advance(1)
    return results


def _capacity(setting: Setting, data_set: DataSet, name: str, limit: float, lower: float) -> Throughput:
    serve = setting.server(name)
    curve: dict[float, float] = {}
    rows: dict[float, float] = {}

    def is_within(rate: float) -> bool:
        served = serve(data_set.jobs(_NUM_ARRIVING[data_set.name], rate, seed=0))
        curve[rate], rows[rate] = served.late_latency, served.mean_rows
        return served.late_latency <= limit

    while not is_within(lower):
        lower /= 2
    upper = 2 * lower
    while upper < _MOST_RATE and is_within(upper):  # few requests are within it however fast they arrive
        lower, upper = upper, 2 * upper
    for _ in range(_BISECTIONS):
        middle = (lower * upper) ** 0.5
        if is_within(middle):
            lower = middle
        else:
            upper = middle
    points = tuple(sorted(curve.items()))
    return Throughput(setting.name, data_set.name, name, limit, lower, rows[lower], points)


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Our engine with blocks of a size."""

    data_set: str
    block_size: int
    token_share_of_reserved: float  # with a full cache
    mean_rows: float  # with a full cache
    rate: float  # requests per second
    normalised_latency: float  # at that rate


def block_sizes(
    full: Setting,
    measured: Setting,
    rates: dict[str, float],
    attention: Callable[[str, int], float],
    sizes: Sequence[int],
    advance: Callable[[int], None],
) -> list[BlockSize]:
    """Sizes of blocks (Figure 18b): what they waste, and with the kernels' measured times the latency.

    Args:
        full: the setting in which the cache is full.
        measured: the setting of the latency.
        rates: requests per second, by data set.
        attention: what attention takes on a data set's contexts with blocks of a size, in times of blocks of 16.
        sizes: of a block, in tokens.
        advance: told of every size.
    """
    results = []
    for data_set in DATA_SETS:
        waiting = data_set.jobs(_NUM_SATURATING[data_set.name] // 2, None, seed=1)
        arriving = data_set.jobs(_NUM_ARRIVING[data_set.name] // 2, rates[data_set.name], seed=0)
        for size in sizes:
            packed = serve_paged(waiting, full.deployment(size), while_waiting=True)
            assert isinstance(measured.cost, FittedCost)
            factor = attention(data_set.name, size)
            cost = replace(measured.cost, per_context_token=measured.cost.per_context_token * factor)
            served = serve_paged(arriving, replace(measured.deployment(size), cost=cost))
            results.append(
                BlockSize(
                    data_set=data_set.name,
                    block_size=size,
                    token_share_of_reserved=packed.token_share_of_reserved,
                    mean_rows=packed.mean_rows,
                    rate=rates[data_set.name],
                    normalised_latency=served.late_latency,
                )
            )
            advance(1)
    return results


@dataclass(frozen=True, slots=True)
class Preemption:
    """Our engine with a full cache, and one way to bring back whoever gave way."""

    setting: str
    block_size: int
    method: str  # "recompute", "swap" or "cheaper"
    tokens_per_second: float
    normalised_latency: float
    num_preemptions: int
    num_recomputed_tokens: int


PREEMPTION_METHODS = ("recompute", "swap", "cheaper")


def preemption(
    setting: Setting, block_size: int, recompute_seconds_per_token: float, swap_seconds_per_block: float
) -> list[Preemption]:
    """Recompute, swap and the choice by cost over the same backlog of conversations (Figure 19b).

    Args:
        setting: whose cost of a step knows what a swapped block takes.
        block_size: tokens in a block.
        recompute_seconds_per_token: what the choice goes by.
        swap_seconds_per_block: the same, one way.
    """
    jobs = SHAREGPT.jobs(_NUM_SATURATING[SHAREGPT.name] // 2, None, seed=2)
    deployment = setting.deployment(block_size)
    costs = {
        "recompute": (0.0, 1.0),
        "swap": (1.0, 0.0),
        "cheaper": (recompute_seconds_per_token, swap_seconds_per_block),
    }
    results = []
    for method in PREEMPTION_METHODS:
        recompute, swap = costs[method]
        config = replace(deployment.config, recompute_seconds_per_token=recompute, swap_seconds_per_block=swap)
        num_host_blocks = 0 if method == "recompute" else deployment.num_blocks
        served = serve_paged(jobs, replace(deployment, config=config, num_host_blocks=num_host_blocks))
        results.append(
            Preemption(
                setting=setting.name,
                block_size=block_size,
                method=method,
                tokens_per_second=served.tokens_per_second,
                normalised_latency=served.normalised_latency,
                num_preemptions=served.num_preemptions,
                num_recomputed_tokens=served.num_recomputed_tokens,
            )
        )
    return results
