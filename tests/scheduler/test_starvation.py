"""Nobody waits for ever behind others that keep coming, least of all who holds room that it gets no further with."""

import pytest

from scheduler.sampling_params import BeamSearch
from tests.scheduler.bench import Bench

MOST_STEPS = 300


def steps_among_others(bench, name, num_others, **others):
    """Steps until a request has ended while so many others are there at any time; None if that is too many."""
    num_added = 0
    for num_steps in range(1, MOST_STEPS):
        while len(bench.live) < num_others + 1:
            bench.add(f"other {num_added}", **others)
            num_added += 1
        bench.step()
        bench.tick(0.5)
        if (name, 0) in bench.finish_reasons:
            return num_steps
    return None


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(("max_num_seqs", "width"), [(8, 6), (4, 4), (2, 2)])
def test_beams_that_wait_for_others_do_not_fill_their_tenants_share(overlapped, max_num_seqs, width):
    bench = Bench(max_num_seqs=max_num_seqs, num_blocks=200, max_num_batched_tokens=64, overlapped=overlapped)
    bench.add("beams", tenant="a", max_tokens=8, beam_search=BeamSearch(width))
    assert steps_among_others(bench, "beams", 12, tenant="b", max_tokens=6) is not None
    bench.drain()
    bench.assert_all_exact()


def test_waiting_lifts_a_prompt_that_has_begun_and_gets_no_part_of_the_budget():
    bench = Bench(num_blocks=100, max_num_batched_tokens=16, ageing_seconds=5.0)
    bench.add("low", priority=1, prompt_len=100, max_tokens=2)
    bench.step()
    assert steps_among_others(bench, "low", 8, prompt_len=20, max_tokens=1) is not None
    bench.drain()
    bench.assert_all_exact()


def test_beams_that_gave_way_to_each_other_often_still_give_way_to_a_better_class():
    for num_steps in range(20, 36):
        bench = Bench(max_num_seqs=3, num_blocks=100, ageing_seconds=0.0)
        bench.add("long", max_tokens=100)
        bench.add("beams", priority=1, max_tokens=40, beam_search=BeamSearch(4))
        for _ in range(num_steps):
            bench.step()
        bench.add("high", max_tokens=2)
        for _ in range(3):
            bench.step()
        assert bench.tokens.get(("high", 0)), f"no token of a better class, {num_steps} steps after the beams began"


def test_nobody_leaves_a_full_queue_for_a_newcomer_that_finds_no_place_either():
    bench = Bench(num_blocks=30, max_num_seqs=1, max_queued_tokens=20)
    bench.add("running", prompt_len=60, max_tokens=60)
    bench.step()
    for number in range(4):
        bench.add(f"a{number}", tenant="a", prompt_len=10)
        bench.add(f"b{number}", tenant="b", prompt_len=10)
    bench.add("newcomer", tenant="c", prompt_len=31)
    assert list(bench.dropped) == ["newcomer"]
    bench.add("smaller", tenant="c", prompt_len=15)
    assert sorted(bench.dropped) == ["a3", "b3", "newcomer"]
    bench.drain()
    bench.assert_all_right()
