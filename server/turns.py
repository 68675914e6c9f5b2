"""Lets several holders take turns at a few places: whoever brings much waits behind himself, not before the others.

For one event loop. Knows no work and no keys.
"""

import asyncio
from collections import OrderedDict

_Waiters = OrderedDict[asyncio.Future[None], None]  # in the order they came; to be left at any place of it


class Turns:
    """A number of places, given to those who wait holder by holder, and to each holder's in the order they came."""

    def __init__(self, num_places: int) -> None:
        """All are free."""
        self._num_free = num_places
        self._waiting: OrderedDict[str, _Waiters] = OrderedDict()  # whose turn it is stands first

    async def take(self, holder: str) -> None:
        """Wait for a place. Whoever is cancelled while he waits has none."""
        if self._num_free:  # nobody waits
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, OrderedDict())[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the same moment
                self.give_back()
            else:
                self._leave(holder, turn)
            raise

    def give_back(self) -> None:
        """Leave a place to whoever is next."""
        self._num_free += 1
        while self._num_free and self._waiting:
            holder, waiters = self._waiting.popitem(last=False)
            turn, _ = waiters.popitem(last=False)
            if waiters:
                self._waiting[holder] = waiters  # behind the others
            if not turn.done():
                self._num_free -= 1
                turn.set_result(None)

    def _leave(self, holder: str, turn: asyncio.Future[None]) -> None:
        waiters = self._waiting.get(holder)
        if waiters is not None:
            waiters.pop(turn, None)
            if not waiters:
                del self._waiting[holder]
