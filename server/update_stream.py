"""The updates of one request on their way from the engine to whoever waits for them. Knows neither of the two."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from scheduler.output import SequenceUpdate

Item = SequenceUpdate | Exception | None  # an error ends a request, and None a request that has all of its updates


class UpdateStream:
    """The updates of one request, until each of its n sequences has ended."""

    def __init__(self, num_sequences: int) -> None:
        """Expect updates of sequences 0 .. num_sequences - 1."""
        self._open = set(range(num_sequences))
        self._early: deque[Item] = deque()  # came before anybody took them
        self._receive: Callable[[int, Item], None] | None = None
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
        if not self._open:
            return
        if index is None:
            self._open.clear()
        else:
            self._open.discard(index)
        if not self._open:
            self._put(None)

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self._open.clear()
        self.has_failed = True
        self._put(error)

    def forward(self, receive: Callable[[int, Item], None], position: int = 0) -> None:
        """Hand everything to `receive` as it comes, what has come already included, with the stream's `position`.

        Several streams may be handed to one receiver. It may end sequences of this stream while it has an update.
        """
        self._receive, self._position = receive, position
        while self._early:
            receive(position, self._early.popleft())

    async def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        """Yield updates as they come. Raises EngineDied, EngineUnavailable, RequestDropped or RequestRejected."""
        queue: asyncio.Queue[Item] = asyncio.Queue()
        self.forward(lambda _, item: queue.put_nowait(item))
        while (item := await queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def _put(self, item: Item) -> None:
        if self._receive is None:
            self._early.append(item)
        else:
            self._receive(self._position, item)
