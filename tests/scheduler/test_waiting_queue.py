"""Whose turn it is: a table of cases, and a random walk against a plain model that looks at everybody each time."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged_cache.manager import BlockManager
from scheduler.request import Request, Sequence
from scheduler.sampling_params import SamplingParams
from scheduler.shares import HEAD_START, TenantShares
from scheduler.waiting_queue import WaitingQueue, _PriorityClass

AGEING_SECONDS = 8.0
NO_PREFIX = BlockManager(1, 1).new_prefix()


class Waiting:
    """A queue and the shares of its tenants."""

    def __init__(self, ageing_seconds=AGEING_SECONDS):
        self.shares = TenantShares()
        self.queue = WaitingQueue(self.shares, ageing_seconds)
        self.num_created = 0

    def add(self, tenant="a", priority=0, arrival_time=None, num_tokens=1, charged=0):
        """A request that came just now, or when it is said to have come."""
        arrival = float(self.num_created) if arrival_time is None else arrival_time
        request = Request(
            f"r{self.num_created}", (7,) * num_tokens, SamplingParams(max_tokens=1), arrival, priority, tenant
        )
        sequence = Sequence(self.num_created, request, 0, list(request.prompt_token_ids), NO_PREFIX)
        request.sequences.append(sequence)
        request.first_seq_id = sequence.seq_id
        self.num_created += 1
        self.shares.enter(tenant)
        self.queue.add(sequence)
        self.shares.charge(tenant, charged)
        return sequence

    def take_all(self, now=0.0, num_charged_tokens=0):
        """All that wait, in the order of their turns, each charged on its admission."""
        taken = []
        while (head := self.queue.head(now)) is not None:
            self.queue.remove(head)
            self.shares.charge(head.request.tenant, num_charged_tokens)
            taken.append(head)
        return taken


def last_of(queue):
    return next(queue.giving_way(), None)


def test_nobody_waits():
    waiting = Waiting()
    assert waiting.queue.head(0.0) is last_of(waiting.queue) is None
    assert len(waiting.queue) == waiting.queue.num_requests == waiting.queue.num_tokens == 0


def test_the_urgent_go_first_then_the_early():
    waiting = Waiting()
    late, low, early = (waiting.add(priority=p, arrival_time=t) for p, t in ((1, 5.0), (3, 1.0), (1, 2.0)))
    same_time = waiting.add(priority=1, arrival_time=5.0)
    assert waiting.take_all() == [early, late, same_time, low]


def test_tenants_take_turns_by_what_they_have_had():
    waiting = Waiting()
    burst = [waiting.add("burst") for _ in range(4)]
    steady = [waiting.add("steady") for _ in range(2)]
    order = waiting.take_all(num_charged_tokens=10)
    assert order == [burst[0], steady[0], burst[1], steady[1], burst[2], burst[3]]


def test_a_priority_goes_before_any_share():
    waiting = Waiting()
    waiting.add("b", priority=1)
    urgent = waiting.add("a", charged=1000)
    assert waiting.queue.head(0.0) is urgent


def test_waiting_lifts_by_one_of_the_priorities_that_wait():
    waiting = Waiting()
    old = waiting.add(priority=100, arrival_time=0.0)
    waiting.add(priority=50, arrival_time=16.0)
    young = waiting.add(priority=-3, arrival_time=16.0)
    assert [waiting.queue.priority_of(old, now) for now in (7.5, 8.0, 15.5, 16.0, 900.0)] == [100, 50, 50, -3, -3]
    assert waiting.queue.head(15.5) is young
    assert waiting.queue.head(16.0) is old, "it came earlier than those whose class it has reached"


def test_whoever_is_most_urgent_or_waits_without_ageing_is_lifted_nowhere():
    waiting = Waiting()
    first = waiting.add(priority=1)
    assert waiting.queue.priority_of(first, 1e9) == 1
    never = Waiting(ageing_seconds=0)
    low, high = never.add(priority=1), never.add(priority=0)
    assert never.queue.priority_of(low, 1e9) == 1
    assert never.queue.head(1e9) is high


def test_a_sequence_that_waits_elsewhere_is_lifted_by_those_that_wait_here():
    waiting = Waiting()
    elsewhere = waiting.add(priority=5, arrival_time=0.0)
    waiting.queue.remove(elsewhere)
    waiting.add(priority=2, arrival_time=0.0)
    assert waiting.queue.priority_of(elsewhere, AGEING_SECONDS) == 2
    assert waiting.queue.priority_of(elsewhere, 0.0) == 5


def test_the_lifted_share_the_class_by_what_tenants_have_had():
    waiting = Waiting()
    waiting.add("b", priority=0, arrival_time=100.0)
    lifted = waiting.add("a", priority=1, arrival_time=100.0 - AGEING_SECONDS)
    waiting.add("c", priority=1, arrival_time=95.0)
    for tenant, num_tokens in (("b", 50), ("a", 20), ("c", 10)):
        waiting.shares.charge(tenant, num_tokens)
    assert waiting.queue.head(100.0) is lifted, "c has had less, and has not waited long enough"


def test_who_gives_way_is_of_the_least_urgent_class_then_of_the_tenant_with_the_most_tokens_then_the_latest():
    waiting = Waiting()
    waiting.add("a", priority=0, num_tokens=90)
    waiting.add("b", priority=1, num_tokens=50)
    early, late = (waiting.add("a", priority=1, num_tokens=1) for _ in range(2))
    assert last_of(waiting.queue) is late
    waiting.queue.remove(late)
    assert last_of(waiting.queue) is early


def test_who_was_served_at_once_so_far_has_nothing_saved_up():
    """Both tenants are active all the time, and only one of them ever had to wait."""
    waiting = Waiting()
    waiting.shares.enter("light")
    waiting.add("heavy", charged=1000)
    assert waiting.shares.service_of("light") == 0
    waiting.add("light")
    assert waiting.shares.service_of("light") == 1000 - HEAD_START, "little less than whoever waits"
    assert waiting.queue.head(0.0).request.tenant == "light"
    waiting.take_all()
    waiting.shares.charge("light", 2000)
    waiting.add("light")
    waiting.take_all()
    waiting.add("heavy")
    assert waiting.shares.service_of("heavy") == 3000 - 2 * HEAD_START, "little less than the last that waited"


def test_the_order_of_tenants_keeps_no_trace_of_those_that_ceased_to_wait():
    waiting = Waiting()
    waiting.add("first")
    for _ in range(10_000):
        waiting.queue.remove(waiting.add("fickle"))
    assert len(waiting.queue._classes[0]._by_service) < 100


def plain_turn(waiting, present, now):
    """Whose turn it is, by its definition."""
    classes = sorted({s.request.priority for s in present})

    def place(sequence):
        request = sequence.request
        num_lifts = int((now - request.arrival_time) // AGEING_SECONDS) if now > request.arrival_time else 0
        lifted = max(0, classes.index(request.priority) - num_lifts)
        return lifted, waiting.shares.service_of(request.tenant), request.arrival_time, sequence.seq_id

    return min(present, key=place, default=None), classes[place(min(present, key=place))[0]] if present else None


def test_of_thousands_of_priorities_only_those_are_asked_that_waiting_can_have_lifted(monkeypatch):
    waiting = Waiting()
    first = waiting.add(priority=0, arrival_time=100.0)
    for priority in range(1, 500):
        waiting.add(priority=priority, arrival_time=100.0)
    oldest = waiting.add(priority=2, arrival_time=80.0)
    asked = []
    monkeypatch.setattr(_PriorityClass, "aged_head", lambda priority_class, *_: asked.append(priority_class))
    assert waiting.queue.head(100.0) is first
    assert len(asked) == 2
    waiting.queue.remove(oldest)
    assert waiting.queue.head(100.0) is first
    assert len(asked) == 2


class QueueMachine(RuleBasedStateMachine):
    """Requests come in any order of arrival, are admitted or leave, and tenants are charged."""

    def __init__(self):
        super().__init__()
        self.waiting = Waiting()
        self.present = []
        self.admitted = []
        self.now = 0.0
        self.last_tenant = None

    @rule(
        tenant=st.sampled_from("abcd"),
        priority=st.sampled_from([0, 0, 0, -7, 1, 1000]),
        age=st.integers(-8, 80),  # in quarters of a second: exact in floats
        num_tokens=st.integers(1, 30),
        repeats=st.sampled_from([1, 1, 5]),
    )
    def arrive(self, tenant, priority, age, num_tokens, repeats):
        for _ in range(repeats):
            services = [self.waiting.shares.service_of(s.request.tenant) for s in self.present]
            if not services and self.last_tenant is not None:
                services = [self.waiting.shares.service_of(self.last_tenant)]
            is_first = all(s.request.tenant != tenant for s in self.present)
            before = self.waiting.shares.service_of(tenant)
            self.present.append(self.waiting.add(tenant, priority, self.now - age / 4, num_tokens))
            after = self.waiting.shares.service_of(tenant)
            assert after >= before
            if is_first and services:
                assert after >= min(services) - HEAD_START
            elif not is_first:
                assert after == before

    @rule(seconds=st.sampled_from([0.25, 1.0, 8.0, 17.0, -3.0]))
    def pass_time(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.present)
    @rule(num_tokens=st.integers(0, 40))
    def admit(self, num_tokens):
        head = self.waiting.queue.head(self.now)
        self._remove(head)
        self.admitted.append(head)
        self.waiting.shares.charge(head.request.tenant, num_tokens)

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), num_tokens=st.integers(0, 40), ends=st.booleans())
    def run(self, data, num_tokens, ends):
        sequence = data.draw(st.sampled_from(self.admitted))
        self.waiting.shares.charge(sequence.request.tenant, num_generated_tokens=num_tokens)
        if ends:
            self.admitted.remove(sequence)
            self.waiting.shares.leave(sequence.request.tenant)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def abort(self, data):
        sequence = data.draw(st.sampled_from(self.present))
        self._remove(sequence)
        self.waiting.shares.leave(sequence.request.tenant)

    def _remove(self, sequence):
        self.waiting.queue.remove(sequence)
        self.present.remove(sequence)
        if all(s.request.tenant != sequence.request.tenant for s in self.present):
            self.last_tenant = sequence.request.tenant
        assert sequence not in self.waiting.queue

    @invariant()
    def turns_are_those_of_the_plain_model(self):
        queue = self.waiting.queue
        queue.check_integrity()
        turn, lifted = plain_turn(self.waiting, self.present, self.now)
        assert queue.head(self.now) is turn
        if turn is not None:
            assert queue.priority_of(turn, self.now) == lifted

    @invariant()
    def those_who_give_way_are_those_of_the_plain_model(self):
        left = list(self.present)

        def keenness(sequence):
            request = sequence.request
            num_tokens = sum(s.num_tokens for s in left if s.request.tenant == request.tenant)
            return request.priority, num_tokens, request.arrival_time, sequence.seq_id

        for sequence in self.waiting.queue.giving_way():
            assert sequence is max(left, key=keenness)
            left.remove(sequence)
        assert not left

    @invariant()
    def counts_agree(self):
        queue = self.waiting.queue
        assert set(queue) == set(self.present)
        assert len(queue) == queue.num_requests == len(self.present)
        assert queue.num_tokens == sum(s.num_tokens for s in self.present)
        assert all(s in queue for s in self.present)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
