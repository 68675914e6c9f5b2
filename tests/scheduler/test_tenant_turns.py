"""What one tenant's burst does to another's time to first token, in simulated time with this project's CPU step costs.

The real scheduler plans; a step takes as long as a fit of measured ones says.
"""

from random import Random
from statistics import median

import pytest

from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.output import NewRow, RowResult, SchedulerOutput, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

SECONDS_PER_STEP, SECONDS_PER_PROMPT_TOKEN, SECONDS_PER_DECODE = 0.018, 0.00067, 0.00125
NUM_STEADY = 40
MAX_NUM_SEQS = 64


class SimulatedEngine:
    """A scheduler, a clock, and answers of the length that was asked for."""

    def __init__(self):
        config = SchedulerConfig(MAX_NUM_SEQS, 512, 8192, long_prefill_token_threshold=128)
        self.scheduler = Scheduler(config, BlockManager(4000, 16))
        self.now = 0.0
        self.steps = []
        self.first_tokens = {}
        self.num_known = {}  # by seq_id
        self.live = {}  # request id -> tenant
        self.random = Random(0)

    def add(self, tenant, num_prompt_tokens, num_tokens, arrival_time):
        name = f"{tenant} {len(self.first_tokens) + len(self.live)} {self.random.random()}"
        prompt = tuple(self.random.randrange(1000) for _ in range(num_prompt_tokens))
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        self.scheduler.add(Request(name, prompt, params, arrival_time, tenant=tenant), self.now)
        self.live[name] = tenant
        return name

    def step(self):
        output = self.scheduler.schedule(self.now)
        num_decodes = sum(row.num_new_tokens == 1 for row in output.rows)
        num_prompt_tokens = output.num_tokens - num_decodes
        seconds = SECONDS_PER_STEP + num_prompt_tokens * SECONDS_PER_PROMPT_TOKEN + num_decodes * SECONDS_PER_DECODE
        self.now += seconds
        self.steps.append((seconds, num_decodes, num_prompt_tokens))
        for update in self.scheduler.update(output, self._result(output), self.now):
            self.first_tokens.setdefault(update.request_id, self.now)
            if update.finish_reason is not None:
                del self.live[update.request_id]

    def _result(self, output: SchedulerOutput):
        rows = []
        for row in output.rows:
            if isinstance(row, NewRow):
                self.num_known[row.seq_id] = len(row.token_ids)
            samples = row.end == self.num_known[row.seq_id]
            self.num_known[row.seq_id] += samples
            rows.append(RowResult((7,) if samples else ()))
        return StepResult(tuple(rows))


def steady_ttfts(num_prompt_tokens, interval, burst_prompt_tokens=None):
    """The steady tenant's times to first token, while the other one has always more waiting than can run."""
    engine = SimulatedEngine()
    arrivals, when = {}, 1.0
    todo = []
    for _ in range(NUM_STEADY):
        todo.append(when)
        when += interval * engine.random.uniform(0.5, 1.5)
    num_burst = 0 if burst_prompt_tokens is None else 2 * MAX_NUM_SEQS if burst_prompt_tokens < 1000 else 16
    while todo or "steady" in engine.live.values():
        for _ in range(num_burst - sum(tenant == "burst" for tenant in engine.live.values())):
            engine.add("burst", burst_prompt_tokens, 64, engine.now)
        while todo and todo[0] <= engine.now:
            arrival = todo.pop(0)
            arrivals[engine.add("steady", num_prompt_tokens, 16, arrival)] = arrival
        if engine.live:
            engine.step()
        else:
            engine.now = todo[0]
    engine.scheduler.check_integrity()
    return sorted(engine.first_tokens[name] - arrival for name, arrival in arrivals.items())


@pytest.mark.parametrize("burst_prompt_tokens", [90, 3000])
@pytest.mark.parametrize(("num_prompt_tokens", "interval"), [(90, 0.4), (300, 1.0)])
def test_a_burst_does_not_double_another_tenants_time_to_first_token(num_prompt_tokens, interval, burst_prompt_tokens):
    alone = steady_ttfts(num_prompt_tokens, interval)
    beside = steady_ttfts(num_prompt_tokens, interval, burst_prompt_tokens)
    assert median(beside) < 2 * median(alone)
    assert beside[int(0.95 * NUM_STEADY)] < 2 * alone[int(0.95 * NUM_STEADY)]


def test_decodes_that_are_held_back_go_on_after_a_few_steps():
    """Whoever asks for cached prompts is charged little, and may have had the least for long."""
    engine = SimulatedEngine()
    for _ in range(MAX_NUM_SEQS - 16):
        engine.add("many", 20, 200, 0.0)
    for _ in range(20):
        engine.step()
    cached = tuple(range(161))
    engine.steps.clear()
    for place in range(40):
        request = Request(f"few {place}", cached, SamplingParams(max_tokens=1), engine.now, tenant="few")
        engine.scheduler.add(request, engine.now)
        engine.live[request.request_id] = "few"
        engine.step()
    is_decoding = [num_decodes >= MAX_NUM_SEQS - 16 for _, num_decodes, _ in engine.steps]
    assert not all(is_decoding)
    assert all(any(is_decoding[place : place + 5]) for place in range(35))


def test_a_tenant_that_is_alone_has_whole_steps():
    engine = SimulatedEngine()
    for _ in range(30):
        engine.add("one", 400, 50, 0.0)
    engine.step()
    engine.step()
    assert [num_prompt_tokens + num_decodes for _, num_decodes, num_prompt_tokens in engine.steps] == [512, 512]


def test_a_burst_is_kept_short_from_its_first_step_on():
    """When it comes, nothing tells yet who will have run how much."""
    engine = SimulatedEngine()
    arrivals = {}
    for number in range(12):
        engine.now = max(engine.now, 1.0 + 0.4 * number)
        if number == 3:
            for _ in range(240):
                engine.add("burst", 90, 64, engine.now)
        arrival = 1.0 + 0.4 * number
        arrivals[engine.add("steady", 90, 16, arrival)] = arrival
        while engine.live and engine.now < 1.4 + 0.4 * number:
            engine.step()
    while "steady" in engine.live.values():
        engine.step()
    waits = [engine.first_tokens[name] - arrival for name, arrival in arrivals.items()]
    alone, beside = waits[:3], waits[3:]
    assert max(beside) < 2.5 * max(alone)
    assert median(beside) < 2 * median(alone)
