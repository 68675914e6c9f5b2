"""Tokens as callers are told them in `usage`, in all and by the name of the key that asked; who waits, and gives way.

Counted at the edge, so that they outlive the engine: what an answer's `usage` says, or would have said when it ended in
another way. The number of series is bounded whatever the number of keys. Knows neither requests nor keys.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client.core import Metric

from scheduler.request_report import RequestReport
from server.metric_families import Families, Snapshot

MAX_KEY_NAMES = 50
NO_KEY = "none"  # the label of callers who need no key
OTHER_KEYS = "other"  # of those whose names came after the first MAX_KEY_NAMES


@dataclass(slots=True)
class Usage:
    """What the holders of one label have had. Whoever serves them adds to it, on the event loop."""

    num_requests: int = 0
    num_prompt_tokens: int = 0  # each prompt once, whatever n
    num_cached_tokens: int = 0  # of them
    num_generation_tokens: int = 0
    num_ended_prompts: int = 0  # in the engine, however
    queue_seconds: float = 0.0  # that they waited for their first admission
    num_preemptions: int = 0  # of their sequences

    def add_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """The engine's first word on a prompt has come, with how much of it was cached."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens

    def add_report(self, report: RequestReport) -> None:
        """A prompt has ended in the engine."""
        self.num_ended_prompts += 1
        self.queue_seconds += report.queue_seconds
        self.num_preemptions += report.num_preemptions


_BY_KEY: dict[str, tuple[str, Callable[[Usage], float]]] = {
    "requests": ("Requests for an answer.", attrgetter("num_requests")),
    "prompt_tokens": ("Prompt tokens.", attrgetter("num_prompt_tokens")),
    "generation_tokens": ("Generated tokens.", attrgetter("num_generation_tokens")),
    "prompts": ("Prompts that have ended in the engine.", attrgetter("num_ended_prompts")),
    "queue_seconds": ("What they waited for their first admission.", attrgetter("queue_seconds")),
    "preemptions": ("Times that one of their sequences lost its blocks.", attrgetter("num_preemptions")),
}


class UsageSeries:
    """Counters of tokens and requests."""

    def __init__(self, families: Families, key_names: Iterable[str] = ()) -> None:
        """`key_names` are those that are known at the start, whose series are there from then on."""
        self._families = families
        self._by_label = {OTHER_KEYS: Usage()}
        for name in key_names:
            self.of(name)

    def of(self, key_name: str | None) -> Usage:
        """Where to count what the holder of this key has; None: he needed none."""
        label = key_name or NO_KEY
        usage = self._by_label.get(label)
        if usage is None:
            if len(self._by_label) > MAX_KEY_NAMES:
                label = OTHER_KEYS
            usage = self._by_label.setdefault(label, Usage())
        return usage

    def snapshot(self) -> Snapshot:
        """Every series, as of now."""
        usages = {label: copy(usage) for label, usage in self._by_label.items()}
        return lambda: [*self._in_all(usages.values()), *self._by_key(usages)]

    def _in_all(self, usages: Collection[Usage]) -> Iterable[Metric]:
        make = self._families
        prompt = sum(usage.num_prompt_tokens for usage in usages)
        cached = sum(usage.num_cached_tokens for usage in usages)
        generated = sum(usage.num_generation_tokens for usage in usages)
        yield make.counter("vllm:prompt_tokens", "Prompt tokens, as usage tells them.", prompt)
        yield make.counter("vllm:prompt_tokens_cached", "Of them, those that were cached.", cached)
        yield make.counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
            "source",
            {"local_compute": prompt - cached, "local_cache_hit": cached, "external_kv_transfer": 0},
        )
        yield make.counters(
            "vllm:prompt_tokens_cached_by_source",
            "Cached prompt tokens by where they were kept; elsewhere than with the KV cache, none are.",
            "source",
            {"device": cached, **dict.fromkeys(("host", "p2p", "disk", "external_unspecified"), 0)},
        )
        yield make.counter("vllm:generation_tokens", "Generated tokens, as usage tells them.", generated)

    def _by_key(self, usages: Mapping[str, Usage]) -> Iterable[Metric]:
        for name, (documentation, value_of) in _BY_KEY.items():
            values = {label: value_of(usage) for label, usage in usages.items()}
            yield self._families.counters(f"octavo_key_{name}", f"{documentation} By the key's name.", "key", values)
