"""Requests that wait for their first admission: whose turn it is, and who gives way when the queue is full.

Strict priority classes, with ageing; in a class the tenant that has had the least service; in a tenant by arrival.
Reads what tenants have had from TenantShares; must not know blocks, budgets or why somebody has to wait.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeAlias

from scheduler.policy import serving_order
from scheduler.request import Sequence
from scheduler.shares import HEAD_START, TenantShares

_Place: TypeAlias = tuple[float, int, int, Sequence]  # in a lane: by arrival, siblings together; three are unique
_Turn: TypeAlias = tuple[float, float, int, int, Sequence]  # the service that its tenant has had, then its place


class WaitingQueue:
    """Who is next, without a look at everybody: 10,000 may wait."""

    def __init__(self, shares: TenantShares, ageing_seconds: float) -> None:
        """Lift a request by one of the priorities that wait for every `ageing_seconds` waited; 0 = never.

        A tenant must have entered `shares` before it waits.
        """
        self._shares = shares
        self._ageing_seconds = ageing_seconds
        self._sequences: dict[Sequence, None] = {}
        self._priorities: list[int] = []  # that wait, the most urgent first
        self._classes: dict[int, _PriorityClass] = {}
        self._seq_ids: set[int] = set()
        self._arrivals: list[tuple[float, int]] = []  # a heap of times and seq_ids, some of whom do not wait any more
        self._num_requests_of: dict[str, int] = {}  # by tenant
        self._num_tokens_of: dict[str, int] = {}  # of their prompts
        self._last_to_leave = ""  # the tenant that last had nothing left to wait for
        self.num_tokens = 0  # of the prompts that wait

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return len(self._sequences)

    def __len__(self) -> int:
        """Sequences that wait: one of each request."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they were added."""
        return iter(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        """Whether it waits here."""
        return sequence in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Let the first sequence of a request wait.

        A tenant that had none waiting counts as having had what the tenants have that wait, or had the last one whose
        requests ceased to wait, but for a head start: whoever was served at once all the time has no more than that
        saved up (the paper's Algorithm 2, lines 7 to 14).
        """
        assert sequence not in self._sequences, f"sequence {sequence.seq_id} waits already"
        request, tenant = sequence.request, sequence.request.tenant
        if tenant not in self._num_requests_of:
            self._shares.lift(tenant, self._least_service() - HEAD_START)
        self._sequences[sequence] = None
        self._seq_ids.add(sequence.seq_id)
        heappush(self._arrivals, (request.arrival_time, sequence.seq_id))
        if len(self._arrivals) > 2 * len(self._sequences) + 64:
            self._arrivals = [arrival for arrival in self._arrivals if arrival[1] in self._seq_ids]
            heapify(self._arrivals)
        if request.priority not in self._classes:
            insort(self._priorities, request.priority)
            self._classes[request.priority] = _PriorityClass(self._shares)
        self._classes[request.priority].add(sequence)
        self._count(tenant, 1, len(request.prompt_token_ids))

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence wait no longer."""
        del self._sequences[sequence]
        self._seq_ids.remove(sequence.seq_id)
        request, tenant = sequence.request, sequence.request.tenant
        priority_class = self._classes[request.priority]
        priority_class.remove(sequence)
        if not priority_class.lanes:
            del self._classes[request.priority]
            self._priorities.remove(request.priority)
        self._count(tenant, -1, -len(request.prompt_token_ids))

    def head(self, now: float) -> Sequence | None:
        """Whose turn it is.

        The most urgent class that waits is asked, and those in the others that have waited long enough to count as
        of it. Costs the logarithm of the number of tenants, and in less urgent classes their number.
        """
        if not self._priorities:
            return None
        turn = self._classes[self._priorities[0]].head()
        if self._ageing_seconds and len(self._priorities) > 1:
            # Callers choose priorities, and thousands may wait: none is lifted further than whoever has waited longest.
            most_lifts = _num_lifts(self._first_arrival(), now, self._ageing_seconds)
            for num_lifts, priority in enumerate(self._priorities[1 : most_lifts + 1], 1):
                turn = min(turn, self._classes[priority].aged_head(now, num_lifts, self._ageing_seconds) or turn)
        return turn[-1]

    def priority_of(self, sequence: Sequence, now: float) -> int:
        """A sequence's priority as waiting has lifted it: never above the most urgent one that waits, if below it."""
        priority = sequence.request.priority
        place = bisect_left(self._priorities, priority)
        num_lifts = _num_lifts(sequence.request.arrival_time, now, self._ageing_seconds)
        return self._priorities[max(0, place - num_lifts)] if place and num_lifts else priority

    def giving_way(self) -> Iterator[Sequence]:
        """Who gives way when the queue is full, one after another. Nobody is removed by it.

        In the least urgent class, of the tenant of whom the most tokens wait, the latest arrival.
        """
        num_tokens_of = self._num_tokens_of.copy()  # as if those before had left
        for priority in reversed(self._priorities):
            lanes = self._classes[priority].lanes
            num_left = {tenant: len(lane) for tenant, lane in lanes.items()}
            while num_left:
                most = max(num_tokens_of[tenant] for tenant in num_left)
                last = max(lanes[tenant][num - 1] for tenant, num in num_left.items() if num_tokens_of[tenant] == most)
                yield last[-1]
                request = last[-1].request
                num_tokens_of[request.tenant] -= len(request.prompt_token_ids)
                num_left[request.tenant] -= 1
                if not num_left[request.tenant]:
                    del num_left[request.tenant]

    def check_integrity(self) -> None:
        """Prove that places, classes and counts agree.

        Raises:
            AssertionError: saying what does not.
        """
        assert self._priorities == sorted(self._classes), "the priorities that wait are out of order"
        placed = [s for priority_class in self._classes.values() for s in priority_class.checked_sequences()]
        assert len(placed) == len(self._sequences) and set(placed) == self._sequences.keys(), "a sequence has no place"
        assert self._seq_ids == {s.seq_id for s in placed}, "the numbers of those who wait are wrong"
        assert self._seq_ids <= {seq_id for _, seq_id in self._arrivals}, "an arrival is forgotten"
        for priority, priority_class in self._classes.items():
            assert all(s.request.priority == priority for s in priority_class.checked_sequences())
        tenants = [s.request.tenant for s in placed]
        assert self._num_requests_of == Counter(tenants), "the tenants' requests are miscounted"
        tokens: Counter[str] = Counter()
        for sequence in placed:
            tokens[sequence.request.tenant] += sequence.num_prompt_tokens
        assert self._num_tokens_of == tokens, "the tenants' tokens are miscounted"
        assert self.num_tokens == tokens.total(), "the tokens that wait are miscounted"

    def _first_arrival(self) -> float:
        while self._arrivals[0][1] not in self._seq_ids:
            heappop(self._arrivals)
        return self._arrivals[0][0]

    def _count(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._num_requests_of[tenant] = self._num_requests_of.get(tenant, 0) + num_requests
        self._num_tokens_of[tenant] = self._num_tokens_of.get(tenant, 0) + num_tokens
        if not self._num_requests_of[tenant]:
            del self._num_requests_of[tenant], self._num_tokens_of[tenant]
            self._last_to_leave = tenant

    def _least_service(self) -> float:
        """Of the tenants that wait; if there is none, of the last that did."""
        heads = [priority_class.head() for priority_class in self._classes.values()]
        return min((turn[0] for turn in heads), default=self._shares.service_of(self._last_to_leave))


class _PriorityClass:
    """The sequences of one priority, in a lane for each tenant."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self.lanes: dict[str, list[_Place]] = {}  # by tenant, none empty, in order
        # A heap of the lanes' heads by the service of their tenants. Services only grow, so an entry may come up too
        # early, never too late; it is brought up to date then. One that is not its lane's `_entries` is out of date.
        self._by_service: list[_Turn] = []
        self._entries: dict[str, _Turn] = {}

    def add(self, sequence: Sequence) -> None:
        lane = self.lanes.setdefault(sequence.request.tenant, [])
        place = _place(sequence)
        insort(lane, place)
        if lane[0] is place:
            self._enter(sequence.request.tenant)
            if len(self._by_service) > 2 * len(self.lanes) + 64:
                self._by_service = list(self._entries.values())
                heapify(self._by_service)

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        lane = self.lanes[tenant]
        del lane[bisect_left(lane, _place(sequence))]
        if not lane:
            del self.lanes[tenant], self._entries[tenant]

    def head(self) -> _Turn:
        """The turn of the tenant with the least service."""
        heap = self._by_service
        while True:
            entry = heap[0]
            tenant = entry[-1].request.tenant
            if self._entries.get(tenant) is not entry:
                heappop(heap)
                continue
            turn = self._turn(tenant)
            if turn == entry:
                return entry
            self._entries[tenant] = turn
            heapreplace(heap, turn)

    def aged_head(self, now: float, num_lifts: int, ageing_seconds: float) -> _Turn | None:
        """The turn of the tenant with the least service among those whose first has waited for that many lifts."""
        turn = self.head()
        if _num_lifts(turn[1], now, ageing_seconds) >= num_lifts:
            return turn
        not_after = now - num_lifts * ageing_seconds + 1.0  # a cheap first look: there may be thousands of lanes
        old = (tenant for tenant, lane in self.lanes.items() if lane[0][0] < not_after)
        aged = (t for t in old if _num_lifts(self.lanes[t][0][0], now, ageing_seconds) >= num_lifts)
        return min(map(self._turn, aged), default=None)

    def checked_sequences(self) -> Iterator[Sequence]:
        """All of them, proving their places on the way. Raises AssertionError."""
        assert self._entries.keys() == self.lanes.keys(), "a lane is not in the heap"
        assert {id(entry) for entry in self._entries.values()} <= {id(entry) for entry in self._by_service}
        for tenant, lane in self.lanes.items():
            assert lane and lane == sorted(lane), f"the lane of tenant {tenant!r} is out of order"
            assert self._entries[tenant][:-1] <= self._turn(tenant)[:-1], f"tenant {tenant!r} comes up too late"
            for place in lane:
                assert place[-1].request.tenant == tenant
                yield place[-1]

    def _turn(self, tenant: str) -> _Turn:
        return (self._shares.service_of(tenant), *self.lanes[tenant][0])

    def _enter(self, tenant: str) -> None:
        turn = self._turn(tenant)
        self._entries[tenant] = turn
        heappush(self._by_service, turn)


def _place(sequence: Sequence) -> _Place:
    _, arrival, first_seq_id, index = serving_order(sequence)
    return arrival, first_seq_id, index, sequence


def _num_lifts(arrival_time: float, now: float, ageing_seconds: float) -> int:
    return int(max(0.0, now - arrival_time) // ageing_seconds) if ageing_seconds else 0
