"""The engine's loop over the real scheduler and the scheduler tests' fake runner: in turn, and one step ahead."""

from dataclasses import replace
from functools import partial

import pytest

from paged_cache.manager import BlockManager
from scheduler.admission import RequestRefused
from scheduler.config import SchedulerConfig
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from server import engine as engine_module
from server.engine import Engine
from server.messages import EngineInfo, Submit
from server.step_clock import STEP_PARTS, StepClock
from server.token_ids import TokenIds
from tests.scheduler.fake_runner import VOCAB_SIZE, FakeRunner, expected_tokens

EOS = frozenset({3, 17})


class WatchedRunner(FakeRunner):
    """Remembers how many steps were in flight at most."""

    num_in_flight = most_in_flight = 0

    def launch(self, output):
        pending = super().launch(output)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        read = pending.result

        def result():
            self.num_in_flight -= 1
            return read()

        pending.result = result
        return pending


def build(num_blocks=12, **settings):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    scheduler = Scheduler(SchedulerConfig(**limits, eos_token_ids=EOS), BlockManager(num_blocks, 4))
    info = EngineInfo(64, num_blocks, 4, VOCAB_SIZE, "fake", "cpu", "float32", 0.0, 0)
    return Engine(scheduler, WatchedRunner(4, limits["max_num_seqs"]), info, **settings)


def serve(engine, requests, abort_after=None):
    """Every token of every sequence; `abort_after` names a request and the number of steps after which it goes."""
    for name, (prompt, params) in requests.items():
        engine.submit(Submit(name, TokenIds(prompt), params, 0.0))
    tokens, num_steps = {}, 0
    while engine.has_unfinished:
        for update in engine.step():
            tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
        num_steps += 1
        if abort_after is not None and num_steps == abort_after[1]:
            engine.abort(abort_after[0], None)
        assert num_steps < 500
    return tokens


def workload():
    return {
        f"r{i}": (list(range(i, i + 3 + 4 * i)), SamplingParams(max_tokens=14 - i, n=1 + i % 2, seed=i))
        for i in range(7)
    }


@pytest.mark.parametrize(("settings", "most_in_flight"), [({}, 1), ({"async_scheduling": True}, 2)])
def test_both_loops_give_every_token_and_leave_a_whole_pool(settings, most_in_flight):
    engine = build(**settings)
    tokens = serve(engine, workload())
    assert engine.stats.num_preemptions > 0
    for name, (prompt, params) in workload().items():
        for index in range(params.n):
            assert tokens[name, index] == expected_tokens(prompt, params, index, EOS)
    assert engine._runner.most_in_flight == most_in_flight
    assert engine._runner.num_in_flight == 0
    engine.check_integrity()
    stats = engine.stats
    assert (
        stats.num_integrity_failures == stats.num_used_blocks == stats.num_shared_blocks == stats.num_empty_slots == 0
    )
    assert sum(stats.step_token_counts) == stats.num_steps
    assert stats.num_step_tokens >= stats.num_prompt_tokens - stats.num_prefix_hits + stats.num_recomputed_tokens
    assert all(stats.step_seconds[part] > 0 for part in STEP_PARTS)


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}])
def test_an_idle_engine_spends_no_time_between_steps(monkeypatch, settings):
    now = 0.0
    monkeypatch.setattr(engine_module, "StepClock", partial(StepClock, lambda: now))
    engine = build(**settings)
    for name in ("a", "b"):
        serve(engine, {name: ([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))})
        engine.take_rejected()  # as the loop does before it waits
        now += 1000.0
    assert sum(engine.stats.step_seconds.values()) == 0


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_an_abort_of_the_last_request_drains_the_steps_in_flight(num_steps):
    engine = build(async_scheduling=True)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    tokens = serve(engine, {"a": ([1, 2, 3], params)}, abort_after=("a", num_steps))
    assert len(tokens.get(("a", 0), [])) == num_steps - 1  # the first step brings nothing, the last is dropped
    assert engine._runner.num_in_flight == 0
    engine.check_integrity()
    # The next request's first step tells the runner to forget the aborted one.
    assert len(serve(engine, {"b": ([4, 5], params)})["b", 0]) == 30


@pytest.mark.parametrize("unknown", [-1, VOCAB_SIZE])
def test_an_id_that_is_not_of_the_vocabulary_is_refused_by_its_field(unknown):
    engine, params = build(), SamplingParams(max_tokens=3)
    last = VOCAB_SIZE - 1
    fields = {
        "stop_token_ids": lambda token_id: (1, token_id),
        "logit_bias": lambda token_id: ((token_id, 1.0), (1, 1.0)),
        "allowed_token_ids": lambda token_id: (1, token_id),
        "bad_words": lambda token_id: ((1,), (2, token_id, 3)),
    }
    with pytest.raises(RequestRefused, match=f"0 to {last}") as refused:
        engine.submit(Submit("a", TokenIds([1, unknown, 2]), params, 0.0))
    assert refused.value.param == "prompt"
    for name, of in fields.items():
        with pytest.raises(RequestRefused, match=name) as refused:
            engine.submit(Submit("a", TokenIds([1]), replace(params, **{name: of(unknown)}), 0.0))
        assert refused.value.param == name
    assert not engine.has_unfinished
    whole = replace(params, **{name: of(last) for name, of in fields.items()})
    engine.submit(Submit("a", TokenIds([0, last]), whole, 0.0))
    assert engine.has_unfinished
