"""Which requests must have begun, or ended, by when. Asked each step, so that it costs nothing where nothing is due.

Knows times and requests; must not know what becomes of those that are late.
"""

from heapq import heappop, heappush

from scheduler.request import Request


class Deadlines:
    """The times that requests came with, in order. Those of one that has ended stay until they have come."""

    def __init__(self) -> None:
        """Watch nobody."""
        self._times: list[tuple[float, int, str, bool]] = []  # a heap of (time, first seq_id, request_id, of the queue)

    def watch(self, request: Request) -> None:
        """Remember a request's times, if it has any."""
        for time, is_of_queue in ((request.queue_deadline, True), (request.deadline, False)):
            if time is not None:
                heappush(self._times, (time, request.first_seq_id, request.request_id, is_of_queue))

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
