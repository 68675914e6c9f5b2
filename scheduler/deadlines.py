"""Which requests must have begun, or ended, by when. Asked each step, so that it costs nothing where nothing is due.

Knows times and requests; must not know what becomes of those that are late.
"""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from scheduler.request import Request

_FEW = 64  # times are no burden


class Deadlines:
    """The times that requests came with, in order. Those of requests that have ended stay while they are few."""

    def __init__(self, unfinished: Mapping[str, Request]) -> None:
        """Watch nobody yet of the `unfinished` requests, which others add and remove, by id."""
        self._unfinished = unfinished
        self._times: list[tuple[float, int, str, bool]] = []  # a heap of (time, first seq_id, request_id, of the queue)

    def __len__(self) -> int:
        """Times that are remembered."""
        return len(self._times)

    def watch(self, request: Request) -> None:
        """Remember a request's times, if it has any."""
        for time, is_of_queue in ((request.queue_deadline, True), (request.deadline, False)):
            if time is not None:
                heappush(self._times, (time, request.first_seq_id, request.request_id, is_of_queue))
        if len(self._times) > 4 * len(self._unfinished) + _FEW:  # two of each at most: the others have ended
            self._times = [time for time in self._times if self._is_watched(*time[1:3])]
            heapify(self._times)

    def due(self, now: float) -> list[tuple[str, int, bool]]:
        """Whose time has come since the last call.

        Returns:
            Each request's id and the number of its first sequence, and whether it is its time in the queue.
        """
        found = []
        while self._times and self._times[0][0] <= now:
            _, first_seq_id, request_id, is_of_queue = heappop(self._times)
            found.append((request_id, first_seq_id, is_of_queue))
        return found

    def _is_watched(self, first_seq_id: int, request_id: str) -> bool:
        request = self._unfinished.get(request_id)
        return request is not None and request.first_seq_id == first_seq_id
