"""Tokens as callers are told them in `usage`, in all and by the name of the key that asked.

Counted at the edge, so that they outlive the engine: what an answer's `usage` says, or would have said when it ended in
another way. The number of series is bounded whatever the number of keys. Knows neither requests nor keys.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

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

    def add_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """The engine's first word on a prompt has come, with how much of it was cached."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens

    def as_row(self) -> tuple[int, int, int, int]:
        """Requests, and tokens of prompts, that were cached, and of answers."""
        return self.num_requests, self.num_prompt_tokens, self.num_cached_tokens, self.num_generation_tokens


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
        rows = {label: usage.as_row() for label, usage in self._by_label.items()}
        return lambda: self._collect(rows)

    def _collect(self, rows: Mapping[str, tuple[int, int, int, int]]) -> Iterable[Metric]:
        make = self._families
        columns = zip(*rows.values(), strict=True)
        num_requests, num_prompt, num_cached, num_generated = (
            dict(zip(rows, column, strict=True)) for column in columns
        )
        prompt, cached = sum(num_prompt.values()), sum(num_cached.values())
        yield make.counter("vllm:prompt_tokens", "Prompt tokens, as usage tells them.", prompt)
        yield make.counter("vllm:prompt_tokens_cached", "Of them, those that were cached.", cached)
        yield make.counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
            "source",
            {"local_compute": prompt - cached, "local_cache_hit": cached, "external_kv_transfer": 0},
        )
        yield make.counter(
            "vllm:generation_tokens", "Generated tokens, as usage tells them.", sum(num_generated.values())
        )
        yield make.counters("octavo_key_requests", "Requests for an answer, by the key's name.", "key", num_requests)
        yield make.counters("octavo_key_prompt_tokens", "Prompt tokens by the key's name.", "key", num_prompt)
        yield make.counters("octavo_key_generation_tokens", "Generated tokens by the key's name.", "key", num_generated)
