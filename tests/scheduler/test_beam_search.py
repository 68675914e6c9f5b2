"""Beams over the fake model: the answers of a plain search, whatever forks, waits, gives way or is cut into chunks."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.output import RowResult, StepResult, TokenLogprobs
from scheduler.request import Request
from scheduler.sampling_params import BeamSearch, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.shares import TenantShares
from tests.scheduler.beam_reference import expected_beams
from tests.scheduler.bench import Bench
from tests.scheduler.fake_runner import VOCAB_SIZE, Prefixes, next_candidates

EOS = frozenset({3, 17, 31})
WORKLOAD = [  # prompt's length and parameters
    (9, {"n": 1, "beam_search": BeamSearch(4), "max_tokens": 14}),
    (1, {"n": 3, "beam_search": BeamSearch(3, length_penalty=0.0), "max_tokens": 12}),
    (12, {"n": 2, "beam_search": BeamSearch(5, length_penalty=2.0, early_stopping=True), "max_tokens": 16}),
    (6, {"n": 1, "beam_search": BeamSearch(1), "max_tokens": 8}),
    (7, {"n": 4, "beam_search": BeamSearch(4, length_penalty=-1.0), "max_tokens": 9, "min_tokens": 5}),
    (5, {"n": 2, "beam_search": BeamSearch(3), "max_tokens": 10, "ignore_eos": True, "stop_token_ids": (9, 40)}),
    (4, {"n": 2, "max_tokens": 11}),  # sampled
]
SWAPPED = {"num_host_blocks": 12, "recompute_seconds_per_token": 1.0, "swap_seconds_per_block": 0.1}


def run_workload(**limits) -> Bench:
    bench = Bench(eos_token_ids=EOS, **limits)
    for i, (prompt_len, params) in enumerate(WORKLOAD):
        bench.add(f"r{i}", prompt_len, **params)
    bench.drain()
    return bench


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(
    ("limits", "is_cramped"),
    [
        ({"num_blocks": 400, "max_num_seqs": 32}, False),
        ({"num_blocks": 400, "max_num_seqs": 32, "block_size": 1, "max_num_batched_tokens": 5}, False),
        ({"num_blocks": 400, "max_num_seqs": 2, "max_num_batched_tokens": 3}, True),
        ({"num_blocks": 400, "max_num_seqs": 1}, True),
        ({"num_blocks": 9, "max_num_batched_tokens": 8}, True),
        ({"num_blocks": 28, "block_size": 1, "enable_prefix_caching": False}, True),
        ({"num_blocks": 9, **SWAPPED}, True),
    ],
    ids=["roomy", "chunked", "two slots", "one slot", "few blocks", "few blocks, no cache", "swapped"],
)
def test_the_answers_are_those_of_a_plain_search(limits, is_cramped, overlapped):
    bench = run_workload(overlapped=overlapped, **limits)
    bench.assert_all_right()
    assert (bench.scheduler.stats.num_preemptions > 0) == is_cramped
    assert (bench.scheduler.stats.num_swapped_in_blocks > 0) == ("num_host_blocks" in limits)
    for name, request in bench.requests.items():
        if request.params.beam_search is not None:
            answers = expected_beams(list(request.prompt_token_ids), request.params, EOS)
            assert [bench.finish_reasons[name, index] for index in range(request.params.n)] == [r for _, r in answers]
            assert all(len(bench.updates[name, index]) == 1 for index in range(request.params.n))


def test_the_workload_ends_in_every_way():
    """Else the test above says little: answers end by themselves and at their length, early and late."""
    bench = run_workload(num_blocks=400, max_num_seqs=32)
    searched = [name for name, r in bench.requests.items() if r.params.beam_search is not None]
    reasons = {bench.finish_reasons[name, 0] for name in searched}
    assert reasons == {"stop", "length"}
    lengths = {len(bench.tokens[name, 0]) for name in searched}
    assert len(lengths) > 3


@settings(max_examples=60, deadline=None)
@given(
    searches=st.lists(
        st.tuples(
            st.integers(1, 5),  # width
            st.integers(1, 5),  # n, at most the width
            st.sampled_from([1.0, 0.0, 2.0, -0.5]),
            st.booleans(),
            st.integers(1, 9),  # prompt's length
            st.integers(0, 10),  # max_tokens
        ),
        min_size=1,
        max_size=3,
    ),
    num_blocks=st.integers(20, 60),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(1, 16),
    overlapped=st.booleans(),
)
def test_any_search_in_any_room(searches, num_blocks, max_num_seqs, budget, overlapped):
    bench = Bench(
        num_blocks,
        block_size=1,
        overlapped=overlapped,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        eos_token_ids=EOS,
    )
    for i, (width, n, length_penalty, early_stopping, prompt_len, max_tokens) in enumerate(searches):
        search = BeamSearch(width, length_penalty, early_stopping)
        bench.add(f"r{i}", prompt_len, n=min(n, width), max_tokens=max_tokens, beam_search=search)
    bench.drain()
    bench.assert_all_right()


def test_beams_share_their_blocks_and_give_them_back():
    bench = Bench(num_blocks=200, block_size=4, max_num_seqs=8)
    bench.add("r", prompt_len=40, max_tokens=20, n=4, beam_search=BeamSearch(4))
    saved = []
    while bench.scheduler.has_unfinished:
        bench.step()
        saved.append(bench.scheduler.stats.num_saved_blocks)
    # Four beams hold the ten blocks of the prompt once, for as long as all of them live.
    assert max(saved) >= 30
    assert all(num_saved >= 30 for num_saved in saved[1:-1])
    stats = bench.scheduler.stats
    assert (stats.num_used_blocks, stats.num_saved_blocks) == (0, 0)


@pytest.mark.parametrize("logprobs", [0, 12])
def test_the_log_probabilities_add_up_to_the_order_of_the_answers(logprobs):
    bench = Bench(num_blocks=200, eos_token_ids=EOS)
    request = bench.add("r", prompt_len=3, max_tokens=9, n=4, beam_search=BeamSearch(4, 0.5), logprobs=logprobs)
    bench.drain()
    scores = []
    for index in range(4):
        [update] = bench.updates["r", index]
        known = list(request.prompt_token_ids)
        for token_id, score in zip(update.token_ids, update.logprobs, strict=True):
            candidates = next_candidates(Prefixes(known).digests[-1], VOCAB_SIZE)
            assert score == TokenLogprobs(token_id, dict(candidates)[token_id], tuple(candidates[:logprobs]))
            known.append(token_id)
        scores.append(sum(score.logprob for score in update.logprobs) / len(update.token_ids) ** 0.5)
    assert scores == sorted(scores, reverse=True)


def test_what_a_search_costs_is_told_with_its_first_answer():
    bench = Bench(num_blocks=12, block_size=2, enable_prefix_caching=False)
    bench.add("r", prompt_len=8, max_tokens=12, n=2, beam_search=BeamSearch(4))
    bench.drain()
    [first], [second] = bench.updates["r", 0], bench.updates["r", 1]
    assert first.num_recomputed_tokens == bench.scheduler.stats.num_recomputed_tokens > 0
    assert second.num_recomputed_tokens == 0
    report = bench.reports["r"]
    assert report.num_recomputed_tokens == first.num_recomputed_tokens
    assert report.num_generated_tokens == sum(len(update.token_ids) for update in (first, second))
    assert sorted((s.index, s.finish_reason) for s in report.sequences) == [(0, "length"), (1, "length")]


def test_nothing_is_left_of_an_aborted_search():
    for num_steps in range(1, 12):
        bench = Bench(num_blocks=200)
        bench.add("r", max_tokens=20, n=2, beam_search=BeamSearch(4))
        for _ in range(num_steps):
            bench.step()
        bench.abort("r", index=1)
        assert not bench.scheduler.has_unfinished
        bench.drain()


# ---- what the model says is scripted


def search(candidates, **params) -> list:
    """Run one search over what `candidates` says after the generated tokens; returns the updates."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64, eos_token_ids=EOS)
    scheduler = Scheduler(config, BlockManager(64, 4))
    request = Request("r", (1, 2), SamplingParams(**params), arrival_time=0.0)
    scheduler.add(request)
    updates = []
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        rows = []
        for row in output.rows:
            [sequence] = [s for s in request.sequences if s.seq_id == row.seq_id]
            found = candidates(tuple(sequence.token_ids[2:]))
            rows.append(RowResult(candidates=tuple(found), is_dead_end=not found))
        updates += scheduler.update(output, StepResult(tuple(rows)))
        scheduler.check_integrity()
    assert scheduler.stats.num_used_blocks == 0
    return updates


def test_a_beam_that_no_token_may_follow_dies_alone():
    updates = search(
        lambda generated: [] if generated[-1:] == (4,) else [(4, -0.1), (5, -2.0)],
        max_tokens=3,
        beam_search=BeamSearch(2),
        n=2,
    )
    assert [update.token_ids for update in updates] == [(5, 5, 4), (5, 5, 5)]


@pytest.mark.parametrize("extra", [{}, {"bad_words": ((9,),)}])
def test_fewer_answers_than_are_wanted_is_a_failure_that_names_a_field(extra):
    updates = search(lambda generated: [(7, -0.5)], max_tokens=3, beam_search=BeamSearch(3), n=2, **extra)
    assert [(update.index, update.finish_reason) for update in updates] == [(0, "error"), (1, "error")]
    param = "bad_words" if extra else "n"
    assert {update.failure.param for update in updates} == {param}
    assert (
        updates[0].failure.message
        == f"The beam search found one answer, and n is 2: no other is possible under {param}."
    )


def test_no_answer_at_all_is_a_failure():
    updates = search(lambda generated: [], max_tokens=3, beam_search=BeamSearch(2), allowed_token_ids=(9,))
    assert [update.failure.param for update in updates] == ["allowed_token_ids"]
    assert updates[0].failure.message.startswith("The beam search found no answer")


def test_an_end_below_the_best_continuations_does_not_count():
    """Only ends among the `width` best are answers, as in transformers: here the end is third of all, then first."""
    script = {(): [(4, -0.1), (5, -0.2), (3, -0.3)], (4,): [(3, -0.1), (6, -0.2)], (5,): [(6, -0.9), (3, -9.0)]}
    updates = search(
        lambda generated: script.get(generated, [(8, -0.1), (9, -4.0), (3, -5.0)]),
        max_tokens=3,
        beam_search=BeamSearch(2),
        n=2,
    )
    assert [(u.token_ids, u.finish_reason, u.stop_token_id) for u in updates] == [
        ((4, 3), "stop", 3),
        ((4, 6, 8), "length", None),
    ]


def test_a_tenant_pays_for_every_beam(monkeypatch):
    """While it searches, though nothing of it has come out."""
    charged = Counter()
    charge = TenantShares.charge

    def count(shares, tenant, **tokens):
        charged.update({(tenant, kind): number for kind, number in tokens.items()})
        charge(shares, tenant, **tokens)

    monkeypatch.setattr(TenantShares, "charge", count)
    bench = Bench(num_blocks=200)
    bench.add("searched", 4, tenant="a", max_tokens=12, n=1, beam_search=BeamSearch(4))
    bench.add("sampled", 4, tenant="b", max_tokens=20)
    for _ in range(8):
        bench.step()
    assert ("searched", 0) not in bench.tokens
    # Of the first step there is one row, of each other one for each of the beams.
    assert charged["a", "num_generated_tokens"] == 1 + 7 * 4
    assert charged["b", "num_generated_tokens"] == 8
    assert charged["a", "num_prompt_tokens"] == charged["b", "num_prompt_tokens"] == 4
