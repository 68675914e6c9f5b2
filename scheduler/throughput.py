"""How fast the engine works through tokens, so that whoever finds no room can be told when to come back.

Is told of steps and ends, with times; must not know a clock, the queue or HTTP.
"""

from collections import deque

WINDOW_SECONDS = 10.0
_BUCKET_SECONDS = WINDOW_SECONDS / 40  # steps are counted together until they fill one: memory stays bounded
_NUM_ENDS = 256  # whose lengths stand for those to come


class Throughput:
    """Tokens per second over the last seconds in which there was work, and the length of recent answers."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._since: float | None = None  # the time up to which is counted
        self._buckets: deque[tuple[float, float]] = deque()  # full ones: (seconds, tokens), oldest first
        self._full_seconds = self._full_tokens = 0.0  # of all full ones
        self._seconds = 0.0  # of the one that fills
        self._num_tokens = 0.0
        self._output_lengths: deque[int] = deque(maxlen=_NUM_ENDS)

    def resume(self, now: float) -> None:
        """Count time from now on: work has come to an engine that had none."""
        self._since = now

    def observe(self, num_tokens: float, now: float) -> None:
        """Count a step's tokens, and the time since the step before or since work came.

        Args:
            num_tokens: prompt tokens and generated ones.
            now: in seconds; a clock that was set back costs one step its time.
        """
        if self._since is not None:
            self._seconds += max(0.0, now - self._since)
            self._num_tokens += num_tokens
        self._since = now
        if self._seconds >= _BUCKET_SECONDS:
            self._buckets.append((self._seconds, self._num_tokens))
            self._seconds = self._num_tokens = 0.0
            while sum(seconds for seconds, _ in self._buckets) - self._buckets[0][0] >= WINDOW_SECONDS:
                self._buckets.popleft()
            self._full_seconds = sum(seconds for seconds, _ in self._buckets)
            self._full_tokens = sum(num_tokens for _, num_tokens in self._buckets)

    def observe_end(self, num_generated_tokens: int) -> None:
        """Take the length of an answer that is complete."""
        self._output_lengths.append(num_generated_tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """Prompt and generated tokens; None until a step has taken time."""
        seconds = self._seconds + self._full_seconds
        return (self._num_tokens + self._full_tokens) / seconds if seconds else None

    @property
    def expected_output_tokens(self) -> float:
        """Mean length of recent answers; 0 until one is complete."""
        return sum(self._output_lengths) / len(self._output_lengths) if self._output_lengths else 0.0

    def seconds_for(self, num_tokens: int, num_requests: int = 0) -> float | None:
        """How long the engine needs for what waits.

        Args:
            num_tokens: of the prompts.
            num_requests: whose answers are expected to be as long as recent ones.

        Returns:
            None where nothing has been measured, or nothing got done.
        """
        speed = self.tokens_per_second
        return (num_tokens + num_requests * self.expected_output_tokens) / speed if speed else None
