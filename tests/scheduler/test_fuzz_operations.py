"""A hundred thousand operations on the scheduler and the cache, in every order that is allowed, from fixed seeds.

The machines of test_random_workloads.py find and simplify what goes wrong in short runs from an empty cache; these
runs are long enough for a cache that is full, blocks that are evicted and swapped over and over, and tired counters.
"""

from random import Random

import pytest

from scheduler.admission import RequestRefused
from scheduler.scheduler import MAX_STEPS_IN_FLIGHT
from tests.scheduler.bench import Bench
from tests.scheduler.workloads import LIMITS, REQUESTS, TICKS, arguments_of, bench_of

NUM_OPERATIONS = 100_000
NUM_SEEDS = 25
NUM_BENCHES = 4  # a seed, one after another
MAX_LIVE = 24  # requests; an endless backlog would leave no other state to be seen
WEIGHTS = {"add": 12, "abort": 3, "provide grammar": 2, "wait": 5, "schedule": 26, "launch": 26, "update": 26}


def pick(random, options):
    return {name: random.choice(values) for name, values in options.items()}


class Fuzz:
    """Operations on one bench."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.bench: Bench = bench_of(pick(random, LIMITS), overlapped=True)
        self.scheduled = None
        self.awaiting_grammar: list[str] = []
        self.num_added = 0
        self.num_operations = 0

    def run(self, num_operations):
        while self.num_operations < num_operations:
            possible = self._possible()
            [operation] = self.random.choices(possible, [WEIGHTS[name] for name in possible])
            getattr(self, operation.replace(" ", "_"))()
            self.num_operations += 1
            self.bench.scheduler.check_integrity()
            self._let_go_of_ended()
        self.finish()

    def _possible(self):
        bench = self.bench
        possible = ["wait"]
        if len(bench.live) < MAX_LIVE:
            possible.append("add")
        if bench.live:
            possible.append("abort")
        if self.awaiting_grammar:
            possible.append("provide grammar")
        if self.scheduled is not None:
            possible.append("launch")
        elif bench.scheduler.has_runnable and len(bench.in_flight) < MAX_STEPS_IN_FLIGHT:
            possible.append("schedule")
        if bench.in_flight:
            possible.append("update")
        return possible

    def add(self):
        self.num_added += 1
        name = f"r{self.num_added}"
        picked = pick(self.random, REQUESTS)
        arguments = arguments_of(picked, self.bench, self.num_added)
        try:
            request = self.bench.add(name, **arguments)
        except RequestRefused:
            assert not self.bench.fits(arguments)
            return
        assert self.bench.fits(arguments)
        if request.params.structured_output is not None and not picked["with_grammar"]:
            self.awaiting_grammar.append(name)

    def abort(self):
        name = self.random.choice(list(self.bench.live))
        whole = self.random.random() < 0.5
        self.bench.abort(name, None if whole else self.random.randrange(self.bench.requests[name].params.n))

    def provide_grammar(self):
        self.random.shuffle(self.awaiting_grammar)
        self.bench.provide_grammar(self.awaiting_grammar.pop())

    def wait(self):
        self.bench.tick(self.random.choice(TICKS))

    def schedule(self):
        self.scheduled = self.bench.schedule()

    def launch(self):
        self.bench.launch(self.scheduled)
        self.scheduled = None

    def update(self):
        self.bench.update()

    def finish(self):
        if self.scheduled is not None:
            self.launch()
        while self.bench.in_flight:
            self.update()
        for name in self.awaiting_grammar:
            self.bench.provide_grammar(name)
        self.bench.drain()
        self.bench.assert_all_counted()
        self._let_go_of_ended()

    def _let_go_of_ended(self):
        for name in self.bench.take_ended():
            self.bench.assert_right(name)
            self.bench.forget(name)
            if name in self.awaiting_grammar:
                self.awaiting_grammar.remove(name)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_order_of_operations_breaks_anything(seed):
    random = Random(seed)
    for _ in range(NUM_BENCHES):
        Fuzz(random).run(NUM_OPERATIONS // (NUM_SEEDS * NUM_BENCHES))
