"""Virtual token counters against a plain model that looks at everybody and forgets nobody while anyone is active."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.shares import HEAD_START, OUTPUT_WEIGHT, TenantShares

TENANTS = st.sampled_from("abcdef")


def shares_of(**services):
    """Active tenants that have had that much."""
    shares = TenantShares()
    for tenant, service in sorted(services.items(), key=lambda item: item[1]):
        shares.enter(tenant)
        shares.charge(tenant, service - shares.service_of(tenant))
    return shares


def test_generated_tokens_weigh_more():
    shares = shares_of(a=0, b=0)
    shares.charge("a", num_prompt_tokens=10)
    shares.charge("a", num_generated_tokens=5)
    shares.charge("b", 3, 1)
    assert (shares.service_of("a"), shares.service_of("b")) == (10 + 5 * OUTPUT_WEIGHT, 3 + OUTPUT_WEIGHT)


def test_a_newcomer_counts_as_having_had_little_less_than_the_least_served_has():
    shares = shares_of(a=5000, b=3000)
    shares.enter("c")
    assert shares.service_of("c") == 3000 - HEAD_START
    shares.enter("d")
    assert shares.service_of("d") == 3000 - HEAD_START, "one head start is not added to another"


def test_a_second_request_lifts_nobody():
    shares = shares_of(a=5000, b=0)
    shares.charge("a", 100)
    shares.enter("b")
    assert shares.service_of("b") == 0


def test_who_goes_away_and_comes_back_still_owes_what_it_had_more_than_the_others():
    shares = shares_of(a=5000, b=1000)
    shares.leave("a")
    shares.charge("b", 500)
    shares.enter("a")
    assert shares.service_of("a") == 5000
    shares.leave("b")
    shares.charge("a", 1000)
    shares.enter("b")
    assert shares.service_of("b") == 6000 - HEAD_START, "nothing is saved up while nothing is asked for"


def test_going_away_and_coming_back_gives_no_second_head_start():
    shares = shares_of(a=5000)
    for _ in range(3):
        shares.enter("b")
        shares.charge("b", 100)
        shares.leave("b")
    assert shares.service_of("b") == 5000 - HEAD_START + 300


def test_a_single_counter_is_compared_with_nothing():
    shares = shares_of(a=0)
    assert not shares.are_compared
    shares.enter("b")
    assert shares.are_compared
    shares.leave("b")
    assert shares.are_compared, "what b has had counts when it comes back"


def test_nothing_is_remembered_once_nobody_is_active():
    shares = shares_of(a=500, b=100)
    shares.leave("a")
    shares.leave("b")
    shares.charge("a", 10)  # a result that comes late
    assert shares.service_of("a") == shares.service_of("b") == 0
    shares.check_integrity([], [])


def test_tenants_that_come_and_go_leave_nothing_behind():
    shares = shares_of(steady=0)
    for place in range(10_000):
        shares.enter(f"tenant {place}")
        shares.charge(f"tenant {place}", 100)
        shares.charge("steady", 1000)
        shares.leave(f"tenant {place}")
    assert len(shares._service) < 200 and len(shares._by_service) < 200


def test_running_sequences_are_counted_by_tenant():
    shares = shares_of(a=0, b=0)
    for tenant in "aab":
        shares.started(tenant)
    shares.stopped("b")
    assert (shares.num_running("a"), shares.num_running("b"), shares.num_running("c")) == (2, 0, 0)
    assert shares.num_active == 2
    shares.check_integrity("ab", "aa")


class SharesMachine(RuleBasedStateMachine):
    """Tenants come, are served, and go."""

    def __init__(self):
        super().__init__()
        self.shares = TenantShares()
        self.unfinished = Counter()
        self.running = Counter()
        self.service = Counter()  # of everybody since all of them were idle
        self.first = 0  # what a newcomer begins with

    @rule(tenant=TENANTS)
    def enter(self, tenant):
        if tenant not in self.unfinished:
            self._rise()
            self.service[tenant] = max(self.service[tenant], self.first)
        self.unfinished[tenant] += 1
        self.shares.enter(tenant)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def leave(self, data):
        tenant = data.draw(st.sampled_from(sorted(self.unfinished)))
        self.unfinished -= Counter([tenant])
        if not self.unfinished:
            self.service.clear()
            self.first = 0
        else:
            self._rise()
        self.shares._max_counters = 0  # it forgets whom it can at once
        self.shares.leave(tenant)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), num_prompt_tokens=st.integers(0, 1500), num_generated_tokens=st.integers(0, 50))
    def charge(self, data, num_prompt_tokens, num_generated_tokens):
        tenant = data.draw(st.sampled_from(sorted(self.unfinished)))
        self.service[tenant] += num_prompt_tokens + 2 * num_generated_tokens
        self.shares.charge(tenant, num_prompt_tokens, num_generated_tokens)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), service=st.integers(0, 2000))
    def lift(self, data, service):
        tenant = data.draw(st.sampled_from(sorted(self.unfinished)))
        self.service[tenant] = max(self.service[tenant], service)
        self.shares.lift(tenant, service)

    @rule(tenant=TENANTS)
    def start(self, tenant):
        self.running[tenant] += 1
        self.shares.started(tenant)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def stop(self, data):
        tenant = data.draw(st.sampled_from(sorted(self.running)))
        self.running -= Counter([tenant])
        self.shares.stopped(tenant)

    def _rise(self):
        least = min((self.service[active] for active in self.unfinished), default=0)
        self.first = max(self.first, least - HEAD_START)

    @invariant()
    def counters_are_those_of_the_model(self):
        self.shares.check_integrity(self.unfinished.elements(), self.running.elements())
        assert self.shares.num_active == len(self.unfinished)
        for tenant in "abcdef":
            assert self.shares.num_running(tenant) == self.running[tenant]
            if tenant in self.unfinished:
                assert self.shares.service_of(tenant) == self.service[tenant]


TestShares = SharesMachine.TestCase
TestShares.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
