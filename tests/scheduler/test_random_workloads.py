"""Random workloads: whatever arrives, is aborted, waits too long or runs out of blocks, every answer is right.

Two machines: one goes step by step, the other schedules, launches and updates in every order that is allowed. An answer
is right if it is the one made alone, without a scheduler: no sharing, no chunks, no preemption.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.admission import RequestRefused
from scheduler.scheduler import MAX_STEPS_IN_FLIGHT
from tests.scheduler.workloads import LIMITS, REQUESTS, TICKS, arguments_of, bench_of


def picked_from(options):
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in options.items()})


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, waits and steps in any order over pools of any size; checks every slot and every count."""

    overlapped = False

    @initialize(limits=picked_from(LIMITS))
    def start(self, limits):
        self.bench = bench_of(limits, overlapped=self.overlapped)
        self.num_added = 0
        self.awaiting_grammar: set[str] = set()

    @rule(picked=picked_from(REQUESTS))
    def add(self, picked):
        self.num_added += 1
        name, bench = f"r{self.num_added}", self.bench
        arguments = arguments_of(picked, bench, self.num_added)
        try:
            request = bench.add(name, **arguments)
        except RequestRefused:
            assert not bench.fits(arguments)
        else:
            assert bench.fits(arguments)
            if request.params.structured_output is not None and not picked["with_grammar"]:
                self.awaiting_grammar.add(name)

    @precondition(lambda self: self.awaiting_grammar)
    @rule(data=st.data())
    def provide_grammar(self, data):
        name = data.draw(st.sampled_from(sorted(self.awaiting_grammar)))
        self.awaiting_grammar.discard(name)
        self.bench.provide_grammar(name)

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data, whole):
        """Whatever state it is in; one that has ended may be aborted too."""
        name = data.draw(st.sampled_from(sorted(self.bench.requests)))
        num_answers = self.bench.requests[name].params.n
        self.bench.abort(name, None if whole else data.draw(st.integers(0, num_answers - 1)))

    @rule(seconds=st.sampled_from(TICKS))
    def wait(self, seconds):
        self.bench.tick(seconds)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps):
        for _ in range(num_steps):
            if self.bench.scheduler.has_runnable:
                self.bench.step()

    @invariant()
    def whole(self):
        if hasattr(self, "bench"):
            self.bench.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        for name in self.awaiting_grammar:
            self.bench.provide_grammar(name)
        self.bench.drain()
        self.bench.assert_all_right()
        self.bench.assert_all_counted()


class OverlapMachine(SchedulerMachine):
    """The three calls of a step come one at a time, so that arrivals and aborts fall between any two of them."""

    overlapped = True

    def __init__(self):
        super().__init__()
        self.scheduled = None  # an output that is not launched yet

    @precondition(lambda self: self.scheduled is None and self.bench.scheduler.has_runnable)
    @precondition(lambda self: len(self.bench.in_flight) < MAX_STEPS_IN_FLIGHT)
    @rule()
    def schedule(self):
        self.scheduled = self.bench.schedule()

    @precondition(lambda self: self.scheduled is not None)
    @rule()
    def launch(self):
        self.bench.launch(self.scheduled)
        self.scheduled = None

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def update(self):
        self.bench.update()

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps):
        self._settle()
        super().step(num_steps)

    def teardown(self):
        if hasattr(self, "bench"):
            self._settle()
        super().teardown()

    def _settle(self):
        """Go back to where a loop's turn begins: everything launched, at most one step in flight."""
        if self.scheduled is not None:
            self.launch()
        if len(self.bench.in_flight) == MAX_STEPS_IN_FLIGHT:
            self.update()


SchedulerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
OverlapMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStepByStep = SchedulerMachine.TestCase
TestOverlapped = OverlapMachine.TestCase
