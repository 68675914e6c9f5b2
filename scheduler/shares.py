"""How much of the engine each tenant has had: virtual token counters.

After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024).
Knows tenants by name and counts tokens; must not know requests, queues or clocks. Who is served next is for others to
decide by `service_of`.
"""

from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace

OUTPUT_WEIGHT = 2.0  # of a generated token against one of a prompt, as in the paper, section 5.1
# Weighted tokens that a tenant may have had less than the others when its requests begin to wait. It comes before them
# with its next prompt, and not in turns with theirs: that would double the time to its first token. The paper has none.
HEAD_START = 512.0
_FEW = 64  # counters are no burden


class TenantShares:
    """A counter of weighted tokens for each tenant with unfinished requests. The one with the least is served next.

    A counter outlives its tenant's requests while it is more than a newcomer would begin with, or not long after.
    Nothing is remembered of tenants when no request is left.
    """

    def __init__(self) -> None:
        """Know no tenant yet."""
        self._service: dict[str, float] = {}  # of active tenants and some others
        self._first = 0.0  # the least counter of a tenant that becomes active; it only rises
        self._by_service: list[tuple[float, str]] = []  # a heap; the numbers may lag behind, and tenants be inactive
        self._in_heap: set[str] = set()  # each once
        self._num_unfinished: dict[str, int] = {}
        self._num_requests = 0  # unfinished ones, of all tenants
        self._num_running: dict[str, int] = {}
        self._max_counters = _FEW  # beyond which those that are not needed are forgotten

    @property
    def num_active(self) -> int:
        """Tenants with unfinished requests."""
        return len(self._num_unfinished)

    @property
    def are_compared(self) -> bool:
        """Whether there is more than one counter: a single one decides nothing, charged or not."""
        return len(self._service) > 1

    @property
    def only_tenant(self) -> str | None:
        """The one with unfinished requests, if it is alone."""
        return next(iter(self._num_unfinished)) if len(self._num_unfinished) == 1 else None

    @property
    def are_uneven(self) -> bool:
        """Some tenant has at most half as many unfinished requests as the tenants have on average."""
        num_active = len(self._num_unfinished)
        return num_active > 1 and 2 * num_active * min(self._num_unfinished.values()) <= self._num_requests

    def num_running(self, tenant: str) -> int:
        """Running sequences of a tenant."""
        return self._num_running.get(tenant, 0)

    def service_of(self, tenant: str) -> float:
        """What a tenant has had, in weighted tokens: comparable between active tenants, 0 for one that is not known."""
        return self._service.get(tenant, 0.0)

    def enter(self, tenant: str) -> None:
        """Count one more unfinished request.

        A tenant's first lifts its counter to the least of the active tenants, but for a head start: it can not save up
        service that it did not ask for.
        """
        if tenant not in self._num_unfinished:
            self._rise()
            self._service[tenant] = max(self._service.get(tenant, 0.0), self._first)
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heappush(self._by_service, (self._service[tenant], tenant))
        self._num_unfinished[tenant] = self._num_unfinished.get(tenant, 0) + 1
        self._num_requests += 1

    def leave(self, tenant: str) -> None:
        """Count one unfinished request less."""
        _count_down(self._num_unfinished, tenant)
        self._num_requests -= 1
        if not self._num_unfinished:
            self._service.clear()
            self._by_service.clear()
            self._in_heap.clear()
            self._first = 0.0
            return
        self._rise()
        if len(self._service) > self._max_counters:
            active = self._num_unfinished
            self._service = {t: s for t, s in self._service.items() if t in active or s > self._first}
            self._max_counters = 2 * len(self._service) + _FEW

    def started(self, tenant: str) -> None:
        """Count one more running sequence."""
        self._num_running[tenant] = self._num_running.get(tenant, 0) + 1

    def stopped(self, tenant: str) -> None:
        """Count one running sequence less."""
        _count_down(self._num_running, tenant)

    def charge(self, tenant: str, num_prompt_tokens: float = 0, num_generated_tokens: float = 0) -> None:
        """Count tokens that were computed for a tenant. It has had nothing worth remembering if it is not known."""
        if tenant in self._service:
            self._service[tenant] += num_prompt_tokens + OUTPUT_WEIGHT * num_generated_tokens

    def lift(self, tenant: str, service: float) -> None:
        """Let a known tenant count as one that has had at least `service`."""
        if tenant in self._service:
            self._service[tenant] = max(self._service[tenant], service)

    def check_integrity(self, unfinished: Iterable[str], running: Iterable[str]) -> None:
        """Prove the counts.

        Args:
            unfinished: the tenant of each unfinished request.
            running: the tenant of each running sequence.

        Raises:
            AssertionError: saying what does not agree.
        """
        assert self._num_unfinished == Counter(unfinished), "unfinished requests of tenants are miscounted"
        assert self._num_requests == sum(self._num_unfinished.values()), "the sum of unfinished requests is wrong"
        assert self._num_running == Counter(running), "running sequences of tenants are miscounted"
        assert self._num_unfinished.keys() <= self._service.keys(), "an active tenant has no counter"
        assert self._num_unfinished or not self._service, "counters are left and no tenant is active"
        assert sorted(tenant for _, tenant in self._by_service) == sorted(self._in_heap), (
            "a tenant is in the heap twice"
        )
        assert self._num_unfinished.keys() <= self._in_heap, "an active tenant is not in the heap"
        for service, tenant in self._by_service:
            if tenant in self._num_unfinished:
                assert service <= self._service[tenant], f"the counter of tenant {tenant!r} ran backwards"

    def _rise(self) -> None:
        """Bring up to date what a newcomer begins with."""
        heap = self._by_service
        while heap:
            known, tenant = heap[0]
            if tenant not in self._num_unfinished:
                heappop(heap)
                self._in_heap.remove(tenant)
            elif known < self._service[tenant]:
                heapreplace(heap, (self._service[tenant], tenant))
            else:
                self._first = max(self._first, known - HEAD_START)
                return


def _count_down(counts: dict[str, int], tenant: str) -> None:
    """One less; no entry is kept at 0."""
    counts[tenant] -= 1
    if counts[tenant] == 0:
        del counts[tenant]
