"""Calls the event loop at times that were fixed beforehand, to a fraction of a millisecond, whatever the loop does.

Event loops round their timers to milliseconds, which is as long as a small model takes for a token. A thread that
sleeps is exact, takes no processor, and is not moved by what came before: a late call does not make the next one late.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Due = TypeVar("Due")


class Metronome:
    """Calls back once for each of a series of things, when each is due."""

    def __init__(self, start: float) -> None:
        """`start` is the zero of all times, by `time.perf_counter()`."""
        self._start = start
        self._stopped = threading.Event()

    async def run(self, series: Iterable[tuple[float, Due]], call: Callable[[Due], None]) -> None:
        """Call `call` in the event loop for each of the series at its time; ends after the last.

        The series is drawn one ahead, in the thread: what it makes for a call is made before the call is due.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def beat() -> None:
            failure: Exception | None = None
            try:
                for due, thing in series:
                    delay = self._start + due - time.perf_counter()
                    if self._stopped.wait(delay) if delay > 0 else self._stopped.is_set():
                        break
                    loop.call_soon_threadsafe(call, thing)
            except Exception as error:  # raised where `run` is awaited
                failure = error
            loop.call_soon_threadsafe(_finish, done, failure)

        thread = threading.Thread(target=beat, name="metronome", daemon=True)
        thread.start()
        try:
            await done
        finally:
            self._stopped.set()


def _finish(done: "asyncio.Future[None]", failure: Exception | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)
