"""Random workloads: whatever arrives, is aborted or runs out of blocks, every answer is the one made alone.

Two machines: one goes step by step, the other schedules, launches and updates in every order that is allowed.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.admission import RequestRefused
from scheduler.sampling_params import StructuredOutput
from scheduler.scheduler import MAX_STEPS_IN_FLIGHT
from tests.scheduler.bench import Bench

EOS = frozenset({3, 17, 31})
GRAMMARS = [
    StructuredOutput("json_object"),
    StructuredOutput("json_schema", '{"properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    StructuredOutput("regex", "(ab|c)*"),
    StructuredOutput("choice", '["a", "ab", "abc", "zzz"]'),
    StructuredOutput("grammar", 'start: "[" start? "]"'),
]


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts and steps in any order over pools of any size; checks every slot and every count."""

    overlapped = False

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4, 7]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        cap=st.sampled_from([0, 1, 5]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, cap):
        self.bench = Bench(
            num_blocks,
            block_size,
            overlapped=self.overlapped,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=cap,
            max_model_len=64,
            eos_token_ids=EOS,
        )
        self.aborted: set[tuple[str, int]] = set()
        self.num_added = 0
        self.awaiting_grammar: set[str] = set()

    @rule(
        prompt_len=st.integers(1, 30),
        max_tokens=st.integers(0, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        ignore_eos=st.booleans(),
        scored=st.sampled_from([None, 0]),
        penalty=st.sampled_from([0.0, 0.0, 0.5]),
        grammar=st.sampled_from([None, None, None, *GRAMMARS]),
        with_grammar=st.booleans(),
        priority=st.sampled_from([0, 0, -1, 2]),
    )
    def add(self, prompt_len, max_tokens, n, ignore_eos, scored, penalty, grammar, with_grammar, priority):
        self.num_added += 1
        params = {"max_tokens": max_tokens, "n": n, "ignore_eos": ignore_eos, "prompt_logprobs": scored}
        params |= {"presence_penalty": penalty, "structured_output": grammar}
        num_blocks = self.bench.scheduler.stats.num_blocks
        fits = prompt_len + max_tokens <= num_blocks * self.bench.runner.block_size
        try:
            self.bench.add(f"r{self.num_added}", prompt_len, priority, with_grammar, **params)
        except RequestRefused:
            assert not fits
        else:
            assert fits
            if grammar is not None and not with_grammar:
                self.awaiting_grammar.add(f"r{self.num_added}")

    @precondition(lambda self: self.awaiting_grammar)
    @rule(data=st.data())
    def provide_grammar(self, data):
        name = data.draw(st.sampled_from(sorted(self.awaiting_grammar)))
        self.awaiting_grammar.discard(name)
        self.bench.provide_grammar(name)

    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data, whole):
        if not self.bench.requests:
            return
        name = data.draw(st.sampled_from(sorted(self.bench.requests)))
        request = self.bench.requests[name]
        index = data.draw(st.integers(0, request.params.n - 1))
        self.bench.scheduler.abort(name, None if whole else index)
        self.aborted.update((name, i) for i in range(request.params.n) if whole or i == index)

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
        bench = self.bench
        for name in self.awaiting_grammar:
            bench.provide_grammar(name)
        bench.drain()
        for name, request in bench.requests.items():
            for index in range(request.params.n):
                expected = bench.expected(name, index)
                got = bench.tokens.get((name, index), [])
                if (name, index) in self.aborted:
                    assert got == expected[: len(got)]
                else:
                    assert got == expected
                    assert (name, index) in bench.finish_reasons
            if request.params.prompt_logprobs is not None and (name, 0) not in self.aborted:
                assert bench.prompt_logprobs[name] == list(request.prompt_token_ids[1:])
        assert bench.scheduler.stats.num_generation_tokens == sum(map(len, bench.tokens.values()))


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
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
OverlapMachine.TestCase.settings = settings(
    max_examples=90, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStepByStep = SchedulerMachine.TestCase
TestOverlapped = OverlapMachine.TestCase
