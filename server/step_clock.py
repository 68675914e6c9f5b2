"""Where the time of an engine's steps goes, by part, and how many tokens they compute. Knows no request, no model."""

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Literal

# schedule: choosing a step's tokens and blocks; execute: building, launching and waiting for it; update: taking in its
# tokens; between: messages to and from the edge, and whatever else keeps the next step from beginning.
StepPart = Literal["schedule", "execute", "update", "between"]
STEP_PARTS: tuple[StepPart, ...] = ("schedule", "execute", "update", "between")
# vLLM's buckets for vllm:iteration_tokens_total.
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepClock:
    """A stopwatch that runs while there is something to do: each lap goes to one part of a step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Nothing has run. `clock` counts seconds."""
        self.seconds: dict[StepPart, float] = dict.fromkeys(STEP_PARTS, 0.0)
        self.token_counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)  # steps by their tokens; the last ones beyond all bounds
        self.num_tokens = 0  # of all steps
        self._clock = clock
        self._last: float | None = None  # when the last part ended; None after a rest

    def begins_step(self) -> None:
        """What came before it, since the last step and unless the engine rested, was between steps."""
        if self._last is None:
            self._last = self._clock()
        else:
            self.ends("between")

    def ends(self, part: StepPart) -> None:
        """The time since the last part's end went to this one."""
        assert self._last is not None, f"{part} ends, and no step has begun"
        now = self._clock()
        self.seconds[part] += now - self._last
        self._last = now

    def counts(self, num_tokens: int) -> None:
        """A step has computed so many tokens; one of none, which brings a result only, is no step."""
        if num_tokens:
            self.token_counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
            self.num_tokens += num_tokens

    def rests(self) -> None:
        """There is nothing to do: the time until a step begins belongs to none."""
        self._last = None
