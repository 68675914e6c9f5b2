"""A scheduler, the fake runner that checks it, and what came out: step by step, or with one step in flight.

After each call every count is proved; as a request ends, its answers, its books and the runner's are compared.
"""

from collections import Counter, deque

from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.output import Dropped, SchedulerOutput, SequenceUpdate
from scheduler.request import Request, Sequence, SequenceStatus
from scheduler.request_report import RequestReport
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.beam_reference import expected_beams
from tests.scheduler.fake_runner import FakeRunner, PendingStep, compiled, expected_tokens
from tests.scheduler.row_counts import RowCounts

BETWEEN_ARRIVALS = 0.001  # seconds


class Bench:
    """Drives a scheduler over the fake runner. `overlapped` keeps one step in flight, as the engine does."""

    def __init__(
        self,
        num_blocks=64,
        block_size=4,
        overlapped=False,
        *,
        num_host_blocks=0,
        enable_prefix_caching=True,
        **limits,
    ):
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 200}
        self.config = SchedulerConfig(**{**defaults, **limits})
        self.manager = BlockManager(
            num_blocks, block_size, num_host_blocks=num_host_blocks, enable_prefix_caching=enable_prefix_caching
        )
        self.scheduler = Scheduler(self.config, self.manager)
        self.runner = FakeRunner(block_size, self.config.max_num_seqs, self.config.eos_token_ids)
        self.overlapped = overlapped
        self.now = 0.0
        self.in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self.requests: dict[str, Request] = {}
        self.live: dict[str, Request] = {}  # those that have not ended
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.updates: dict[tuple[str, int], list[SequenceUpdate]] = {}
        self.finish_reasons: dict[tuple[str, int], str] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.dropped: dict[str, Dropped] = {}
        self.reports: dict[str, RequestReport] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.last_answer: tuple[int, ...] = ()  # with its prompt, of the last answer that is complete
        self.counts: dict[int, RowCounts] = {}  # by seq_id
        self._ended: list[str] = []
        self._totals: Counter[str] = Counter()  # over all requests, as the scheduler should have counted them
        self._tenants: set[str] = set()  # that were there when a step was scheduled
        self._realms: dict[tuple[str, str], int] = {("", ""): 0}  # tenant and salt: who may share blocks

    # --- what happens from outside ---

    def add(
        self,
        name,
        prompt_len=5,
        priority=0,
        with_grammar=True,
        *,
        prompt=None,
        tenant="",
        cache_salt="",
        reuses_cache=True,
        queue_timeout=None,
        timeout=None,
        **params,
    ):
        """Add a request; `with_grammar` is false if its grammar shall come later, by `provide_grammar`."""
        self.now += BETWEEN_ARRIVALS
        if prompt is None:
            prompt = tuple((len(self.requests) * 7 + i) % 50 for i in range(prompt_len))
        request = Request(
            name,
            prompt,
            SamplingParams(**{"max_tokens": 5, "seed": len(self.requests), **params}),
            arrival_time=self.now,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            reuses_cache=reuses_cache,
            queue_deadline=None if queue_timeout is None else self.now + queue_timeout,
            deadline=None if timeout is None else self.now + timeout,
        )
        num_waiting, num_waiting_tokens = self._count_queued()
        self.scheduler.add(request, self.now)
        self.requests[name] = self.live[name] = request
        self.aborted -= {(name, index) for index in range(request.params.n)}  # an id is free again after its end
        self._take_ends()
        self._check_queue_bounds(num_waiting, num_waiting_tokens)
        if request.params.structured_output is not None and with_grammar and name in self.live:
            self.provide_grammar(name)
        return request

    def provide_grammar(self, name):
        grammar = compiled(self.requests[name].params.structured_output)
        self.scheduler.provide_grammar(name, grammar.fork(), self.now)

    def abort(self, name, index=None):
        """End a request, or one of its answers; beams live and die together."""
        if name in self.requests:
            params = self.requests[name].params
            whole = index is None or params.beam_search is not None
            self.aborted.update((name, i) for i in range(params.n) if whole or i == index)
        self.scheduler.abort(name, index, self.now)
        self.scheduler.check_integrity()
        self._take_ends()

    def tick(self, seconds):
        """Let time pass. As long as nothing can run, no step looks who is late."""
        self.now += seconds
        if not self.scheduler.has_runnable:
            self.scheduler.drop_late(self.now)
            self._take_ends()

    # --- the three calls of a step ---

    def step(self):
        """One turn of the loop; returns what it scheduled."""
        output = self.schedule()
        self.launch(output)
        if not self.overlapped or len(self.in_flight) > 1:
            self.update()
        return output

    def schedule(self):
        seq_ids = self._live_sequences().keys()
        output = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        self._take_ends()
        sequences = self._live_sequences()
        assert {row.seq_id for row in output.rows} <= sequences.keys(), "a row of a request that has ended"
        self._count(output, sequences)
        self._check_deadlines()
        held = {block_id for sequence in sequences.values() for block_id in sequence.block_table.block_ids}
        assert held.issuperset(move.dst for move in output.swapped_in), "a swap into a block of nobody"
        # Whoever was forked as the step was made has its first row in the next one.
        self._check_budget(output, [s for s in sequences.values() if s.seq_id in seq_ids])
        for sequence in sequences.values():
            self.runner.realms[sequence.seq_id] = self._realm(sequence.request)
        return output

    def launch(self, output):
        self.in_flight.append((output, self.runner.launch(output)))

    def update(self):
        """Take the oldest result."""
        output, pending = self.in_flight.popleft()
        updates = self.scheduler.update(output, pending.result(), self.now)
        self.scheduler.check_integrity()
        for update in updates:
            self._take(update)
        self._take_ends()
        return updates

    def drain(self):
        steps = 0
        while self.scheduler.has_unfinished:
            self.step()
            steps += 1
            assert steps <= 2 * self._num_tokens_to_compute() + 2, "requests do not end"
        while self.in_flight:
            assert self.update() == [], "an update after the end"
        assert not self.live, f"no report of the end of {sorted(self.live)}"
        stats = self.scheduler.stats
        assert (stats.num_used_blocks, stats.num_used_host_blocks, stats.num_saved_blocks) == (0, 0, 0)
        assert (stats.num_running, stats.num_waiting, stats.num_queued_tokens) == (0, 0, 0)
        return steps

    # --- what must come of it ---

    def expected(self, name, index=0):
        request = self.requests[name]
        eos, realm = self.config.eos_token_ids, self._realm(request)
        if request.params.beam_search is not None:
            answers = expected_beams(list(request.prompt_token_ids), request.params, eos, realm)
            return answers[index][0]
        return expected_tokens(request.prompt_token_ids, request.params, index, eos, realm)

    def fits(self, arguments):
        """Whether a request with these arguments of `add` can be served at all."""
        num_tokens = len(arguments["prompt"]) + arguments["max_tokens"]
        return num_tokens <= min(self.config.max_model_len, self.manager.num_blocks * self.manager.block_size)

    def assert_all_exact(self):
        for name, request in self.requests.items():
            for index in range(request.params.n):
                assert self.tokens[name, index] == self.expected(name, index), (name, index)

    def assert_right(self, name):
        """Every answer of a request that has ended is the one made alone; of one that was cut, what there is of it."""
        request = self.requests[name]
        for index in range(request.params.n):
            key = name, index
            expected, got = self.expected(name, index), self.tokens.get(key, [])
            if key in self.finish_reasons:
                assert got == expected, key
            else:
                assert name in self.dropped or key in self.aborted, key
                assert got == expected[: len(got)], key
        is_whole = name not in self.dropped and (name, 0) not in self.aborted
        if request.params.prompt_logprobs is not None and is_whole:
            assert self.prompt_logprobs[name] == list(request.prompt_token_ids[1:])

    def assert_all_right(self):
        for name in self.requests:
            self.assert_right(name)

    def assert_all_counted(self):
        """The counters of the scheduler are the sums over all requests and steps."""
        stats = self.scheduler.stats
        for name in self._totals:
            assert getattr(stats, name) == self._totals[name], name

    def take_ended(self):
        """The names of the requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def forget(self, name):
        """Drop what is remembered of a request that has ended."""
        request = self.requests.pop(name)
        for sequence in request.sequences:
            self.counts.pop(sequence.seq_id, None)
        self.dropped.pop(name, None)
        self.reports.pop(name, None)
        self.prompt_logprobs.pop(name, None)
        for index in range(request.params.n):
            for of_answers in (self.tokens, self.updates, self.finish_reasons):
                of_answers.pop((name, index), None)
            self.aborted.discard((name, index))

    # --- checks ---

    def _realm(self, request: Request) -> int:
        return self._realms.setdefault((request.tenant, request.cache_salt), len(self._realms))

    def _live_sequences(self) -> dict[int, Sequence]:
        return {
            sequence.seq_id: sequence
            for request in self.live.values()
            for sequence in request.sequences
            if sequence.status is not SequenceStatus.FINISHED
        }

    def _count(self, output: SchedulerOutput, sequences: dict[int, Sequence]) -> None:
        self._totals["num_swapped_out_blocks"] += len(output.swapped_out)
        self._totals["num_swapped_in_blocks"] += len(output.swapped_in)
        self._totals["num_copied_blocks"] += len(output.block_copies)
        for row in output.rows:
            was_preempted = sequences[row.seq_id].num_preemptions > 0
            counts = self.counts.setdefault(row.seq_id, RowCounts(row.num_computed_tokens, was_preempted))
            counts.add(row)

    def _check_budget(self, output: SchedulerOutput, sequences: list[Sequence]) -> None:
        """No running sequence is passed over while budget is left, what a preempted one gave back included.

        But where several tenants have shared the engine: there steps are cut short, and may be one tenant's prompts'.
        """
        assert output.num_tokens <= self.config.max_num_batched_tokens
        self._tenants.update(request.tenant for request in self.live.values())
        if len(self._tenants) > 1:
            return
        scheduled = {row.seq_id for row in output.rows}
        passed_over = [
            sequence
            for sequence in sequences
            if sequence.status is SequenceStatus.RUNNING
            and sequence.seq_id not in scheduled
            and sequence.num_uncomputed_tokens > 0
        ]
        assert not passed_over or output.num_tokens == self.config.max_num_batched_tokens, (
            f"sequences {[s.seq_id for s in passed_over]} are passed over while budget is left"
        )

    def _count_queued(self) -> tuple[int, int]:
        """Requests that wait for their first admission, and the tokens of their prompts."""
        waiting = [request for request in self.live.values() if is_queued(request)]
        return len(waiting), sum(len(request.prompt_token_ids) for request in waiting)

    def _check_queue_bounds(self, num_before: int, num_tokens_before: int) -> None:
        """What waits is within its bounds, beyond what could be admitted at once; or a newcomer has added nothing."""
        limits, stats = self.config, self.scheduler.stats
        num_waiting, num_tokens = self._count_queued()
        assert stats.num_queued_tokens == num_tokens
        if num_waiting > 1:
            max_waiting = limits.max_queued_requests + limits.max_num_seqs - stats.num_running
            max_tokens = limits.max_queued_tokens + self.manager.num_free_blocks * self.manager.block_size
            assert not limits.max_queued_requests or num_waiting <= max(max_waiting, num_before)
            assert not limits.max_queued_tokens or num_tokens <= max(max_tokens, num_tokens_before)

    def _check_deadlines(self) -> None:
        """Nobody waits beyond what it allows."""
        for request in self.live.values():
            if request.queue_deadline is not None and is_queued(request):
                assert self.now < request.queue_deadline, f"{request.request_id} waits beyond its queue deadline"
            if request.deadline is not None and is_queued(request):
                assert self.now < request.deadline, f"{request.request_id} waits beyond its deadline"

    def _take(self, update: SequenceUpdate) -> None:
        key = update.request_id, update.index
        assert key not in self.finish_reasons, "an update after the end"
        # The first sequence computes the prompt for its siblings, and scores it, though it is not wanted itself.
        is_silent = not (update.token_ids or update.finish_reason)
        assert is_silent or key not in self.aborted, "tokens of an aborted answer"
        assert update.request_id not in self.dropped, "an update of a dropped request"
        self.updates.setdefault(key, []).append(update)
        self.tokens.setdefault(key, []).extend(update.token_ids)
        self._totals["num_generation_tokens"] += len(update.token_ids)
        self.prompt_logprobs.setdefault(update.request_id, []).extend(t.token_id for t in update.prompt_logprobs)
        if update.finish_reason:
            self.finish_reasons[key] = update.finish_reason
            self.last_answer = (*self.requests[update.request_id].prompt_token_ids, *self.tokens[key])

    def _take_ends(self) -> None:
        """Take what was dropped and what has ended; each request ends once."""
        for dropped in self.scheduler.take_dropped():
            assert dropped.request_id in self.live, "dropped, and it had ended"
            self.dropped[dropped.request_id] = dropped
            self._totals[f"num_dropped_{dropped.cause}"] += 1
            self._check_dropped(self.live[dropped.request_id], dropped)
        for report in self.scheduler.ledger.take_ended():
            request = self.live.pop(report.request_id)
            self._ended.append(report.request_id)
            self.reports[report.request_id] = report
            assert (report.state == "dropped") == (report.request_id in self.dropped)
            if report.state != "dropped":
                self._check_books(request, report)

    def _check_dropped(self, request: Request, dropped: Dropped) -> None:
        limits = self.config
        name = request.request_id
        match dropped.cause:
            case "queue_full":
                assert limits.max_queued_requests or limits.max_queued_tokens
            case "queue_timeout":
                assert request.queue_deadline is not None and self.now >= request.queue_deadline
            case "deadline":
                assert request.deadline is not None and self.now >= request.deadline
        if dropped.cause != "deadline":
            assert not any(s.seq_id in self.counts for s in request.sequences), "dropped after it had run"
            assert not any(self.tokens.get((name, index)) for index in range(request.params.n))
        assert dropped.message

    def _check_books(self, request: Request, report: RequestReport) -> None:
        """Each token of a sequence was cached or computed, and what was computed twice is counted."""
        first = self.counts.get(request.first_seq_id)
        if first is not None and not first.was_preempted:
            assert report.num_cached_tokens == first.start, "more or fewer tokens were cached than reported"
            assert request.reuses_cache or first.start == 0
        for index in range(request.params.n):
            for update in self.updates.get((request.request_id, index), []):
                assert update.num_cached_tokens == (report.num_cached_tokens if index == 0 else 0)
        if request.params.beam_search is not None:
            return
        all_counts = [self.counts.get(sequence.seq_id, RowCounts(0)) for sequence in request.sequences]
        num_recomputed = sum(counts.num_recomputed for counts in all_counts)
        for sequence, counts in zip(request.sequences, all_counts, strict=True):
            if (request.request_id, sequence.index) in self.finish_reasons:
                needed = min(sequence.num_tokens - (request.params.max_tokens > 0), request.max_computed_tokens)
                assert counts.end >= needed, "an answer of tokens that were not computed"
        # What a sequence lost before its first row, it had from the cache or from the one that it was forked from.
        if not any(counts.was_preempted for counts in all_counts):
            assert report.num_recomputed_tokens == num_recomputed
        assert report.num_recomputed_tokens >= num_recomputed
        if all(preemption.is_swapped for preemption in report.preemptions):
            assert num_recomputed == 0, "swapped, and computed again"
        assert report.num_preemptions == sum(sequence.num_preemptions for sequence in request.sequences)

    def _num_tokens_to_compute(self) -> int:
        """At most, recomputed ones included. A step computes one, or else waits for the result of one that did."""
        requests = self.requests.values()
        known = sum(num_answers(r) * (len(r.prompt_token_ids) + r.params.max_tokens + 1) for r in requests)
        return known + self.scheduler.stats.num_recomputed_tokens


def is_queued(request: Request) -> bool:
    """It waits for its first admission, or for its grammar before that."""
    return all(s.status in (SequenceStatus.WAITING, SequenceStatus.WAITING_FOR_GRAMMAR) for s in request.sequences)


def num_answers(request: Request) -> int:
    """Sequences that it may have at once."""
    search = request.params.beam_search
    return request.params.n if search is None else max(request.params.n, 2 * search.width)
