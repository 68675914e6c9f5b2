"""Measures how late the event loop comes to what is due: while it computes, every stream and every probe waits.

A timer, not a task: ten times a second it costs some microseconds. Knows no metrics.
"""

import asyncio
import time
from collections.abc import Callable

INTERVAL = 0.1  # seconds between two looks


class LoopLag:
    """Tells how late each of its timers came. A long block of the loop is seen once, by the timer that fell into it."""

    def __init__(self, observe: Callable[[float], None], interval: float = INTERVAL) -> None:
        """`observe` gets the seconds that a timer came too late; one comes every `interval` seconds."""
        self._observe = observe
        self._interval = interval
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin on the loop that runs."""
        self._due = time.monotonic() + self._interval
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._tick)

    def stop(self) -> None:
        """End; it may be started again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._observe(max(0.0, time.monotonic() - self._due))
        self.start()
