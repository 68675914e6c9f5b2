"""Pictures of the engine for the dashboard, each shared by everyone who watches: one question a second, however many.

A picture that took long is kept for longer, so that watching never costs the engine more than a small part of its time,
nor this process much of a processor. Nobody watches: nothing is asked.
"""

import asyncio
import gzip
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.pool_report import PoolReport
from server.dashboard.pool_image import draw_pool
from server.engine_client import EngineClient
from server.engine_errors import EngineUnavailable

SECONDS = 1.0  # between two pictures
_MOST_OF_ENGINE = 0.02  # of its time
_MOST_OF_EDGE = 0.1  # of a processor, for drawing
_MIN_PACKED = 4096  # bytes; below it packing saves nothing


@dataclass(frozen=True, slots=True)
class PoolPicture:
    """The pool at one moment."""

    number: int  # another one looks different
    content: bytes
    packed: bytes | None  # the same with gzip, where it is smaller


class PoolSnapshots:
    """The newest picture of the block pool."""

    def __init__(self, engine: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        """Ask `engine`, when somebody wants to see one and the last one is old."""
        self._engine = engine
        self._clock = clock
        self._lock = asyncio.Lock()
        # Begins elsewhere with each server: pages compare numbers, and may have known the one that ran before.
        self._numbers = itertools.count(time.time_ns() // 1_000_000)
        self._report: PoolReport | None = None
        self._picture: PoolPicture | None = None
        self._failure: str | None = None  # of the last question
        self._next = -math.inf  # when it is time for another
        self._draw_seconds = 0.0  # of the last picture

    async def newest(self) -> PoolPicture:
        """A picture that is at most a second old, or somewhat more of a large pool.

        Raises:
            EngineUnavailable: if the engine does not answer; everyone is told for a second, and then it is asked again.
        """
        async with self._lock:
            if self._clock() >= self._next:
                await self._take()
            if self._failure is not None:
                raise EngineUnavailable(self._failure)
            assert self._picture is not None
            return self._picture

    async def _take(self) -> None:
        try:
            inspection = await self._engine.inspect_pool()
        except EngineUnavailable as error:
            self._failure = str(error)
            self._next = self._clock() + SECONDS
            return
        self._failure = None
        pause = max(SECONDS, inspection.seconds / _MOST_OF_ENGINE, self._draw_seconds / _MOST_OF_EDGE)
        self._next = self._clock() + pause
        if inspection.report == self._report and self._picture is not None:
            return
        began = self._clock()
        self._picture = await asyncio.to_thread(_draw, inspection.report, next(self._numbers), pause)
        self._report, self._draw_seconds = inspection.report, self._clock() - began


def _draw(report: PoolReport, number: int, pause: float) -> PoolPicture:
    content = draw_pool(report, number, pause)
    packed = gzip.compress(content, compresslevel=1, mtime=0) if len(content) >= _MIN_PACKED else None
    return PoolPicture(number, content, packed if packed is not None and len(packed) < len(content) else None)
