"""Writes the page about paper.py's result: its numbers beside those of the paper. Knows the result and nothing else.

The paper's numbers are from Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023 (arXiv:2309.06180).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.markdown_table import markdown_table

# By server: share of KV memory that holds tokens (Figure 2), requests in the batch at 2 requests/s (Figure 13a).
_PAPER_MEMORY = {"paged": "96.3 %", "oracle": "38.2 %", "pow2": "26.8 %", "max": "20.4 %", "static": ""}
_PAPER_BATCH = {"paged": "30.42", "oracle": "13.62", "pow2": "9.81", "max": "7.00", "static": ""}
# By server: how many times its rate of requests is sustained, ShareGPT (section 6.2, Figure 12).
_PAPER_RATIO = {"oracle": "1.7-2.7", "pow2": "", "max": "2.7-8", "static": "up to 22"}
# By data set and method, widths 2 to 6 (section 6.3, Figure 15).
_PAPER_SAVING = {
    ("ShareGPT", "parallel"): "16.2-30.5 %",
    ("Alpaca", "parallel"): "6.1-9.8 %",
    ("ShareGPT", "beam"): "44.3-66.3 %",
    ("Alpaca", "beam"): "37.6-55.2 %",
}
_SERVERS = {
    "paged": "Octavo, blocks of 16",
    "oracle": "contiguous, oracle",
    "pow2": "contiguous, powers of 2",
    "max": "contiguous, maximum",
    "static": "contiguous, static batches",
}


def report(result: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    parts = [_head(result), _memory(result), _throughput(result), _measured(result)]
    parts += [_sharing(result), _block_sizes(result), _preemption(result)]
    return "\n\n".join(parts) + "\n"


def _head(result: Mapping[str, Any]) -> str:
    lengths = ", ".join(
        f"{each['name']} {each['prompts']['mean']:.0f} in and {each['outputs']['mean']:.0f} out"
        for each in result["data_sets"]
    )
    machine = result["machine"]
    return f"""# The PagedAttention paper on this engine

`make paper` redoes the figures of [the paper](https://arxiv.org/abs/2309.06180) and writes this page,
`benchmarks/results/paper.json` and the plots. Machine: {machine["cores"]} cores of {machine["cpu"]}, torch \
{machine["torch"]}, commit {machine["commit"]}.

What runs is this engine's own scheduler and block manager, in two settings, both with the paper's
{result["num_slots"]:,} slots of KV cache (OPT-13B on a card of 40 GB):

- **the paper's card**, simulated: {result["paper_setting"]}. It is no measurement of a card: it says what the memory
  allows, and is faster than the paper's engine was.
- **this machine**: `{result["model"]}` in float32 on the CPU. Measured where it says so, else simulated with a cost of
  steps that was fitted to measured ones (`benchmarks/step_cost_model.py`).

Lengths are drawn from log-normal distributions with the means of the paper's data sets ({lengths}); arrivals are
Poisson. The servers beside ours are our own, after section 6.1 of the paper: contiguous slots from a buddy allocator,
scheduled by iteration, which reserve the true length (oracle), the answer's length rounded up to a power of two, or
2,048 tokens (maximum); and static batches, which reserve the maximum and end with their longest answer. These are
kinder than most of their kind: prompts are not padded, and an answer is complete when its own last token is there."""


def _memory(result: Mapping[str, Any]) -> str:
    rows = []
    for data_set in _data_sets(result):
        for use in _of(result["memory"], data_set=data_set):
            paper = data_set == "ShareGPT"
            rows.append(
                (
                    data_set,
                    _SERVERS[use["server"]],
                    _percent(use["token_share_of_reserved"]),
                    _percent(use["shares"]["tokens"]),
                    _PAPER_MEMORY[use["server"]] if paper else "",
                    f"{use['mean_rows']:.1f}",
                    f"{use['mean_rows_at_rate']:.1f}",
                    _PAPER_BATCH[use["server"]] if paper else "",
                )
            )
    rates = " and ".join(f"{rate:g}" for rate in dict.fromkeys(use["rate"] for use in result["memory"]))
    table = markdown_table(
        ("lengths", "server", "tokens / reserved", "tokens / all", "paper", "batch, full", "batch, rate", "paper"), rows
    )
    return f"""## Memory

Share of the KV cache that holds tokens while requests wait for room (Figure 2), of the slots that are reserved and of
all slots; and the mean number of requests in the batch (Figure 13) with a full cache, and at {rates} requests/s. At the
paper's rate our cache is not full, since the simulated card is faster: the paper's 30.42 compares with the full cache.

{table}

![What is in a full KV cache](../benchmarks/results/paper_memory.png)"""


def _throughput(result: Mapping[str, Any]) -> str:
    rows = []
    for setting in dict.fromkeys(each["setting"] for each in result["throughput"]):
        for data_set in _data_sets(result):
            here = {each["server"]: each for each in _of(result["throughput"], setting=setting, data_set=data_set)}
            ours = here["paged"]["rate"]
            rows.append((setting, data_set, _SERVERS["paged"], f"{ours:.2f}", "", ""))
            for server in ("oracle", "pow2", "max", "static"):
                paper = _PAPER_RATIO[server] if data_set == "ShareGPT" else ""
                rate = here[server]["rate"]
                rows.append((setting, data_set, _SERVERS[server], f"{rate:.2f}", f"{ours / rate:.1f}", paper))
    limits = ", ".join(
        f"{each['latency_limit'] * 1e3:.0f} ms ({each['setting']}, {each['data_set']})"
        for each in _of(result["throughput"], server="paged")
    )
    return f"""## Throughput at equal latency

The highest rate of requests with a mean normalised latency (seconds from arrival to the last token, by generated token;
Figure 12) of at most five times that of a request that has the engine to itself: {limits}. Simulated;
the mean is over the half of the requests that ended last.

{markdown_table(("setting", "lengths", "server", "requests/s", "Octavo takes, times", "paper"), rows)}

![Latency against the rate of requests](../benchmarks/results/paper_throughput.png)"""


def _measured(result: Mapping[str, Any]) -> str:
    rows = []
    points = result["measured"]
    for point in _of(points, server="paged"):
        (static,) = _of(points, server="static", data_set=point["data_set"], rate=point["rate"])
        rows.append(
            (
                point["data_set"],
                "all at once" if point["rate"] is None else f"{point['rate']:g}",
                str(point["num_requests"]),
                f"{point['tokens_per_second']:.0f}",
                f"{static['tokens_per_second']:.0f}",
                f"{point['tokens_per_second'] / static['tokens_per_second']:.1f}",
                *(
                    f"{each['normalised_latency'] * 1e3:.0f} ({each['simulated_latency'] * 1e3:.0f})"
                    for each in (point, static)
                ),
            )
        )
    head = ("lengths", "requests/s", "requests", "tokens/s", "static", "times", "ms per token", "static")
    return f"""## Measured against static batches

Both servers on the same model, kernels and memory on this machine, on a clock that is the sum of what their steps took
(`benchmarks/static_batching.py`). In brackets what the simulation says of the same requests.

{markdown_table(head, rows)}"""


def _sharing(result: Mapping[str, Any]) -> str:
    widths = list(dict.fromkeys(each["width"] for each in result["sharing"]))
    rows = []
    for (data_set, method), paper in _PAPER_SAVING.items():
        here = _of(result["sharing"], data_set=data_set, method=method)
        what = "parallel sampling" if method == "parallel" else "beam search, measured"
        rows.append((data_set, what, *(_percent(each["share"]) for each in here), paper))
    head = ("lengths", "method", *(f"{width}" for width in widths), f"paper, {widths[0]} to {widths[-1]}")
    return f"""## Memory saved by sharing

KV blocks that sharing saves, of those that would be needed without (Figure 15). What answers to the same prompt share
follows from the lengths; beams were searched with the model, and what they share depends on its text.

{markdown_table(head, rows)}

![Blocks saved by sharing](../benchmarks/results/paper_sharing.png)"""


def _block_sizes(result: Mapping[str, Any]) -> str:
    contexts = list(dict.fromkeys(each["context"] for each in result["attention"]))
    seconds = {(each["context"], each["block_size"]): each["seconds"] for each in result["attention"]}
    contiguous = max(each["block_size"] for each in result["attention"])
    data_sets = _data_sets(result)
    sizes = list(dict.fromkeys(each["block_size"] for each in result["block_sizes"]))
    rows = []
    for size in sizes:
        here = [_of(result["block_sizes"], data_set=name, block_size=size)[0] for name in data_sets]
        rows.append(
            (
                str(size),
                *(_percent(each["token_share_of_reserved"]) for each in here),
                *(f"{each['mean_rows']:.1f}" for each in here),
                *(f"{each['normalised_latency'] * 1e3:.0f}" for each in here),
                *(f"{seconds[context, size] / seconds[context, contiguous]:.2f}" for context in contexts),
            )
        )
    head = (
        "block",
        *(f"tokens / reserved, {name}" for name in data_sets),
        *(f"batch, {name}" for name in data_sets),
        *(f"ms per token, {name}" for name in data_sets),
        *(f"attention at {context}" for context in contexts),
    )
    rates = " and ".join(f"{_of(result['block_sizes'], data_set=name)[0]['rate']:.2f}" for name in data_sets)
    return f"""## Block sizes

What blocks of 1 to 256 tokens waste and how many requests fit with a full cache; the latency on this machine at
{rates} requests/s (0.95 of the capacity with blocks of 16), and the time of our attention kernel over {contexts[0]} and
{contexts[1]} tokens of context in times of that over a contiguous cache, measured. The paper finds 16 to 128 best on
ShareGPT and 16 to 32 on Alpaca, where larger ones hurt (Figure 18b), and its kernel 20-26 % slower than a contiguous
one (Figure 18a).

{markdown_table(head, rows)}

![Block sizes and preemption](../benchmarks/results/paper_blocks.png)"""


def _preemption(result: Mapping[str, Any]) -> str:
    rows = []
    for times in result["restoring"]:
        swap = times["swap_out"] + times["swap_in"]
        cells = [f"{times['recompute'] * 1e3:.1f}", f"{swap * 1e3:.1f}"]
        for setting in dict.fromkeys(each["setting"] for each in result["preemption"]):
            here = _of(result["preemption"], setting=setting, block_size=times["block_size"])
            by_method = {each["method"]: each["tokens_per_second"] for each in here}
            cells += [f"{by_method[method]:.0f}" for method in ("recompute", "swap", "cheaper") if by_method]
            cells += [] if by_method else [""] * 3
        rows.append((str(times["block_size"]), *cells))
    settings = list(dict.fromkeys(each["setting"] for each in result["preemption"]))
    methods = ("recompute", "swap", "by cost")
    head = (
        "block",
        "recompute, ms",
        "swap, ms",
        *(f"{method}, tokens/s, {setting}" for setting in settings for method in methods),
    )
    return f"""## Recompute or swap

What it takes to bring back a sequence of {result["restoring"][0]["num_tokens"]} tokens on this machine, measured: to
compute it again, or to copy its blocks to other memory and back; and the throughput of a backlog of conversations with
a full cache when preempted sequences come back in one way, the other, or the cheaper one, simulated. The paper finds
swapping bad with small blocks, since it copies each alone, and both equal at 16 to 64 (Figure 19). This engine gathers
the blocks of a step before it copies them, so that their size matters less; on a CPU, computing is dear beside copying.

{markdown_table(head, rows)}"""


def _data_sets(result: Mapping[str, Any]) -> list[str]:
    return [each["name"] for each in result["data_sets"]]


def _of(values: Iterable[Mapping[str, Any]], **wanted: object) -> list[Mapping[str, Any]]:
    return [value for value in values if all(value[name] == what for name, what in wanted.items())]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
