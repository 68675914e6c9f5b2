"""What random workloads are made of: limits and requests, as options that a random generator or hypothesis picks from.

Prompts begin alike within a family, or go on from an answer as the next turn of a chat does. Knows no operations.
"""

from collections.abc import Mapping
from typing import Any

from scheduler.sampling_params import BeamSearch, StructuredOutput
from tests.scheduler.bench import Bench
from tests.scheduler.fake_runner import VOCAB_SIZE

EOS = frozenset({3, 17, 31})
MAX_MODEL_LEN = 64
GRAMMARS = [
    StructuredOutput("json_object"),
    StructuredOutput("json_schema", '{"properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    StructuredOutput("regex", "(ab|c)*"),
    StructuredOutput("choice", '["a", "ab", "abc", "zzz"]'),
    StructuredOutput("grammar", 'start: "[" start? "]"'),
]

# Each option is as likely as it stands here; what a machine tries first when it simplifies comes first.
LIMITS: dict[str, list[Any]] = {
    "num_blocks": list(range(4, 25)),
    "block_size": [1, 2, 4, 7],
    "num_host_blocks": [0, 0, 3, 12, 40],
    "enable_prefix_caching": [True, True, True, False],
    "max_num_seqs": [1, 2, 3, 4, 5, 6],
    "max_num_batched_tokens": list(range(1, 25)),
    "long_prefill_token_threshold": [0, 1, 5],
    "max_preemptions": [3, 0, 1],
    "max_queued_requests": [0, 0, 4],
    "max_queued_tokens": [0, 0, 60],
    "ageing_seconds": [0.0, 0.5, 30.0],
    "starving_seconds": [1.0, 0.0],
    # Swapping is never, always or sometimes the cheaper way.
    "swap_costs": [(0.0, 0.0), (1.0, 0.0), (1.0, 3.0)],
}
REQUESTS: dict[str, list[Any]] = {
    "num_alike": list(range(0, 25)),  # tokens in common with the others of its family
    "num_own": list(range(0, 9)),
    "family": [0, 0, 0, 1],
    "follows": [False, False, True],  # a prompt that goes on from an answer, where there is one
    "max_tokens": list(range(0, 21)),
    "kind": [
        *(["plain"] * 8),
        *("2 answers", "3 answers", "scored", "looks back", "stops early", "pooled last", "pooled mean"),
        *("beams", "beams", "grammar", "grammar"),
    ],
    "width": [1, 2, 3, 4],
    "length_penalty": [1.0, 0.0, 2.0, -1.0],
    "early_stopping": [False, True],
    "grammar": GRAMMARS,
    "with_grammar": [True, False],
    "ignore_eos": [False, True],
    "priority": [0, 0, -1, 2],
    "tenant": ["", "", "a", "b"],
    "cache_salt": ["", "", "", "x"],
    "reuses_cache": [True, True, True, True, False],
    "queue_timeout": [None, None, None, None, None, 0.0, 0.3, 3.0],
    "timeout": [None, None, None, None, None, 0.5, 10.0],
}
TICKS = [0.01, 0.2, 1.0, 20.0, -0.5]  # seconds; clocks are set back at times


def bench_of(limits: Mapping[str, Any], *, overlapped: bool) -> Bench:
    """A bench within limits that were picked from LIMITS."""
    limits = dict(limits)
    recompute, swap = limits.pop("swap_costs")
    return Bench(
        overlapped=overlapped,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=EOS,
        recompute_seconds_per_token=recompute,
        swap_seconds_per_block=swap,
        **limits,
    )


def arguments_of(picked: Mapping[str, Any], bench: Bench, number: int) -> dict[str, Any]:
    """The arguments of Bench.add for a request that was picked from REQUESTS, the `number`th of its bench."""
    names = ("priority", "with_grammar", "tenant", "cache_salt", "reuses_cache", "queue_timeout", "timeout")
    arguments = {name: picked[name] for name in names}
    arguments |= {"max_tokens": picked["max_tokens"], "ignore_eos": picked["ignore_eos"], "seed": number}
    return {**arguments, "prompt": _prompt(picked, bench, number), **_params(picked)}


def _prompt(picked: Mapping[str, Any], bench: Bench, number: int) -> tuple[int, ...]:
    alike = [(picked["family"] * 13 + i * i) % VOCAB_SIZE for i in range(picked["num_alike"])]
    own = [(number * 7 + i) % VOCAB_SIZE for i in range(picked["num_own"])]
    if picked["follows"] and bench.last_answer:
        room = max(1, MAX_MODEL_LEN - picked["max_tokens"] - len(own))
        alike = bench.last_answer[:room]
    return (*alike, *own) or (1,)


def _params(picked: Mapping[str, Any]) -> dict[str, Any]:
    match picked["kind"]:
        case "2 answers":
            return {"n": 2}
        case "3 answers":
            return {"n": 3, "prompt_logprobs": 0 if picked["early_stopping"] else None}
        case "scored":
            return {"prompt_logprobs": 0}
        case "looks back":
            return {"presence_penalty": 0.5}
        case "stops early":
            return {"stop_token_ids": (1, 2, 4, 8), "min_tokens": 2}
        case "pooled last" | "pooled mean":
            return {"pooling": picked["kind"].removeprefix("pooled "), "max_tokens": 0}
        case "beams":
            search = BeamSearch(picked["width"], picked["length_penalty"], picked["early_stopping"])
            return {"beam_search": search, "n": min(search.width, 1 + picked["num_own"] % 3)}
        case "grammar":
            return {"structured_output": picked["grammar"], "n": 1 + picked["num_own"] % 2}
    return {}
