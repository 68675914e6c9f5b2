"""A hundred thousand operations on the scheduler and the cache, in every order that is allowed, from fixed seeds.

The machines of test_random_workloads.py find and simplify what goes wrong in short runs from an empty cache; these
runs are long enough for a cache that is full, blocks that are evicted and swapped over and over, and tired counters.
"""

from collections import Counter
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
EVENTS = (
    *("num_prefix_hits", "num_evicted_blocks", "num_recomputed_tokens"),
    *("num_swapped_out_blocks", "num_swapped_in_blocks"),
    *("num_dropped_queue_full", "num_dropped_queue_timeout", "num_dropped_deadline"),
    *("preempted for kv_blocks", "preempted for priority", "preempted for fair_share"),
    *("swapped", "swapped beams", "preempted beams with answers", "siblings of a cached prompt"),
)


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
        self.reached: Counter[str] = Counter()

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
        stats = self.bench.scheduler.stats
        self.reached.update({name: getattr(stats, name) for name in EVENTS if hasattr(stats, name)})

    def _let_go_of_ended(self):
        for name in self.bench.take_ended():
            self.bench.assert_right(name)
            self._note(name)
            self.bench.forget(name)
            if name in self.awaiting_grammar:
                self.awaiting_grammar.remove(name)

    def _note(self, name):
        report, params = self.bench.reports[name], self.bench.requests[name].params
        self.reached.update(f"preempted for {preemption.cause}" for preemption in report.preemptions)
        if any(preemption.is_swapped for preemption in report.preemptions):
            self.reached["swapped beams" if params.beam_search else "swapped"] += 1
        if params.beam_search and report.preemptions and (name, 0) in self.bench.finish_reasons:
            self.reached["preempted beams with answers"] += 1
        if params.n > 1 and report.num_cached_tokens:
            self.reached["siblings of a cached prompt"] += 1


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_order_of_operations_breaks_anything(seed):
    random = Random(seed)
    for _ in range(NUM_BENCHES):
        Fuzz(random).run(NUM_OPERATIONS // (NUM_SEEDS * NUM_BENCHES))


def test_the_operations_reach_what_they_are_to_try():
    """A workload that never swaps or never fills its queue proves nothing about either."""
    reached = Counter()
    random = Random(1)
    missing = list(EVENTS)
    for _ in range(100):
        fuzz = Fuzz(random)
        fuzz.run(500)
        reached += fuzz.reached
        missing = [name for name in EVENTS if not reached[name]]
        if not missing:
            break
    assert not missing
