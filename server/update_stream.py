"""The updates of one request on their way from the engine to whoever waits for them. Knows neither of the two."""

import asyncio
from collections.abc import AsyncIterator

from scheduler.output import SequenceUpdate

UpdateQueue = asyncio.Queue[tuple[int, SequenceUpdate | Exception | None]]


class UpdateStream:
    """The updates of one request, until each of its n sequences has ended."""

    def __init__(self, num_sequences: int) -> None:
        """Expect updates of sequences 0 .. num_sequences - 1."""
        self._open = set(range(num_sequences))
        self._queue: UpdateQueue = asyncio.Queue()
        self._position = 0
        self.has_failed = False

    @property
    def is_open(self) -> bool:
        """Some sequence may still send."""
        return bool(self._open)

    def put(self, update: SequenceUpdate) -> None:
        """Take an update of a sequence that is still open."""
        if update.index not in self._open:
            return  # it was aborted while this update was on its way
        self._put(update)
        if update.finish_reason is not None:
            self.close(update.index)

    def close(self, index: int | None = None) -> None:
        """Expect nothing more of one sequence, or of any."""
        if index is None:
            self._open.clear()
        self._open.discard(index if index is not None else -1)
        if not self._open:
            self._put(None)

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self._open.clear()
        self.has_failed = True
        self._put(error)

    def join(self, queue: UpdateQueue, position: int) -> None:
        """Put everything, what has come already included, into a queue that several streams share.

        An error is put there as it is, and None for the end.
        """
        while not self._queue.empty():
            queue.put_nowait((position, self._queue.get_nowait()[1]))
        self._queue, self._position = queue, position

    async def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        """Yield updates as they come. Raises EngineDied, EngineUnavailable, RequestDropped or RequestRejected."""
        while (item := (await self._queue.get())[1]) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def _put(self, item: SequenceUpdate | Exception | None) -> None:
        self._queue.put_nowait((self._position, item))
