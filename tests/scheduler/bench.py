"""A scheduler, the fake runner that checks it, and what came out: step by step, or with one step in flight."""

from collections import deque

from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.output import SchedulerOutput, SequenceUpdate
from scheduler.request import Request, SequenceStatus
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.fake_runner import FakeRunner, PendingStep, compiled, expected_tokens


class Bench:
    """Drives a scheduler over the fake runner. `overlapped` keeps one step in flight, as the engine does."""

    def __init__(self, num_blocks=64, block_size=4, overlapped=False, **limits):
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 200}
        self.config = SchedulerConfig(**{**defaults, **limits})
        self.manager = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.config, self.manager)
        self.runner = FakeRunner(block_size, self.config.max_num_seqs)
        self.overlapped = overlapped
        self.in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self.requests: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.updates: dict[tuple[str, int], list[SequenceUpdate]] = {}
        self.finish_reasons: dict[tuple[str, int], str] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}

    def add(self, name, prompt_len=5, priority=0, with_grammar=True, **params):
        """Add a request; `with_grammar` is false if its grammar shall come later, by `provide_grammar`."""
        prompt = tuple((len(self.requests) * 7 + i) % 50 for i in range(prompt_len))
        params = SamplingParams(**{"max_tokens": 5, "seed": len(self.requests), **params})
        request = Request(name, prompt, params, arrival_time=float(len(self.requests)), priority=priority)
        self.scheduler.add(request)
        self.requests[name] = request
        if params.structured_output is not None and with_grammar:
            self.provide_grammar(name)
        return request

    def provide_grammar(self, name):
        grammar = compiled(self.requests[name].params.structured_output)
        self.scheduler.provide_grammar(name, grammar.fork())

    def step(self):
        """One turn of the loop; returns what it scheduled."""
        output = self.schedule()
        self.launch(output)
        if not self.overlapped or len(self.in_flight) > 1:
            self.update()
        return output

    def schedule(self):
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self._check_budget(output)
        return output

    def launch(self, output):
        self.in_flight.append((output, self.runner.launch(output)))

    def update(self):
        """Take the oldest result."""
        output, pending = self.in_flight.popleft()
        updates = self.scheduler.update(output, pending.result())
        self.scheduler.check_integrity()
        for update in updates:
            self._take(update)
        return updates

    def _check_budget(self, output):
        """No running sequence is passed over while budget is left, what a preempted one gave back included."""
        assert output.num_tokens <= self.config.max_num_batched_tokens
        scheduled = {row.seq_id for row in output.rows}
        passed_over = [
            sequence
            for request in self.requests.values()
            for sequence in request.sequences
            if sequence.status is SequenceStatus.RUNNING
            and sequence.seq_id not in scheduled
            and sequence.num_uncomputed_tokens > 0
            # Forked as the step was made, of a prompt of one token.
            and not (sequence.index > 0 and sequence.num_computed_tokens == 0)
        ]
        assert not passed_over or output.num_tokens == self.config.max_num_batched_tokens

    def _take(self, update: SequenceUpdate):
        key = update.request_id, update.index
        assert key not in self.finish_reasons, "an update after the end"
        self.updates.setdefault(key, []).append(update)
        self.tokens.setdefault(key, []).extend(update.token_ids)
        self.prompt_logprobs.setdefault(update.request_id, []).extend(t.token_id for t in update.prompt_logprobs)
        if update.finish_reason:
            self.finish_reasons[key] = update.finish_reason

    def drain(self):
        steps = 0
        while self.scheduler.has_unfinished:
            self.step()
            steps += 1
            assert steps <= 2 * self._num_tokens_to_compute() + 2, "requests do not end"
        while self.in_flight:
            assert self.update() == [], "an update after the end"
        assert self.scheduler.stats.num_used_blocks == 0
        return steps

    def _num_tokens_to_compute(self):
        """At most, recomputed ones included. A step computes one, or else waits for the result of one that did."""
        requests = self.requests.values()
        known = sum(r.params.n * (len(r.prompt_token_ids) + r.params.max_tokens + 1) for r in requests)
        return known + self.scheduler.stats.num_recomputed_tokens

    def expected(self, name, index=0):
        request = self.requests[name]
        return expected_tokens(list(request.prompt_token_ids), request.params, index, self.config.eos_token_ids)

    def assert_all_exact(self):
        for name, request in self.requests.items():
            for index in range(request.params.n):
                assert self.tokens[name, index] == self.expected(name, index), (name, index)
