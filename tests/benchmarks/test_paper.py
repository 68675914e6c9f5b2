"""The paper's workloads, allocator and simulated servers, against plain arithmetic and what holds of any of them."""

import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.buddy_allocator import BuddyAllocator, Region, power_of_two
from benchmarks.paper_figures import SERVERS, paper_setting
from benchmarks.paper_servers import RESERVATIONS, serve_contiguous, serve_paged, serve_statically
from benchmarks.paper_sharing import parallel_sampling
from benchmarks.paper_workloads import ALPACA, DATA_SETS, MAX_MODEL_LEN, NUM_SLOTS, SHAREGPT, Job, Lengths, mean_lengths
from scheduler.simulate.step_cost import FittedCost

ONE_SECOND = FittedCost("a second each", ((1, 1.0), (2, 1.0)), 0.0, 0.0, 0.0)


@pytest.mark.parametrize("data_set", DATA_SETS, ids=lambda data_set: data_set.name)
def test_workloads_have_the_papers_mean_lengths(data_set):
    prompt, output = mean_lengths(data_set.jobs(2000, None, seed=3))
    assert prompt == pytest.approx(data_set.prompts.mean, rel=0.02)
    assert output == pytest.approx(data_set.outputs.mean, rel=0.02)
    assert max(job.num_tokens for job in data_set.jobs(2000, None, seed=3)) <= MAX_MODEL_LEN


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.1, 10))
def test_a_rate_scales_the_gaps_and_nothing_else(seed, rate):
    at_one, faster = SHAREGPT.jobs(20, 1.0, seed), SHAREGPT.jobs(20, rate, seed)
    assert [job.arrival / rate for job in at_one] == pytest.approx([job.arrival for job in faster])
    assert [job.num_tokens for job in at_one] == [job.num_tokens for job in faster]


def test_the_mean_holds_where_many_lengths_are_cut_off():
    assert fmean(Lengths(60.0, 2.0, 100).quantiles(1000)) == pytest.approx(60.0, rel=0.02)


def test_typical_jobs_are_quantiles():
    jobs = ALPACA.typical_jobs(9, seed=0)
    assert sorted(job.num_output_tokens for job in jobs) == ALPACA.outputs.quantiles(9)


@given(st.integers(1, 5000), st.lists(st.tuples(st.booleans(), st.integers(1, 600)), max_size=60))
def test_buddies_never_overlap_and_join_again(num_slots, operations):
    allocator = BuddyAllocator(num_slots)
    held: list[Region] = []
    for is_release, size in operations:
        if is_release and held:
            allocator.release(held.pop(size % len(held)))
        elif (region := allocator.allocate(size)) is not None:
            assert region.num_slots == power_of_two(size) >= size
            assert region.start % region.num_slots == 0 and region.start + region.num_slots <= num_slots
            assert all(
                region.start + region.num_slots <= other.start or other.start + other.num_slots <= region.start
                for other in held
            )
            held.append(region)
        assert allocator.num_free_slots == num_slots - sum(region.num_slots for region in held)
    for region in held:
        allocator.release(region)
    most = 1 << (num_slots.bit_length() - 1)
    assert allocator.allocate(most) == Region(0, most)


def test_the_maximum_fits_seven_times_into_the_papers_memory():
    allocator = BuddyAllocator(NUM_SLOTS)
    assert sum(allocator.allocate(MAX_MODEL_LEN) is not None for _ in range(20)) == 7


def test_a_request_alone_takes_a_step_for_each_token():
    job = Job(5.0, 10, 4)
    for served in (
        serve_contiguous([job], ONE_SECOND, "oracle", 64, 8),
        serve_statically([job], ONE_SECOND, MAX_MODEL_LEN),
    ):
        assert served.latencies == [1.0]
        assert (served.end, served.busy_seconds, served.row_seconds) == (9.0, 4.0, 4.0)
        assert served.token_slot_seconds == 10 + 11 + 12 + 13


def test_what_is_reserved_is_told_apart():
    served = serve_contiguous([Job(0.0, 10, 4)], ONE_SECOND, "oracle", 64, 8)
    assert served.later_slot_seconds == 3 + 2 + 1 + 0  # 13 tokens are stored in the end
    assert served.unused_slot_seconds == 4 * (16 - 13)
    assert sum(served.shares.values()) == pytest.approx(1.0)


def test_a_static_batch_holds_up_whoever_comes_later():
    jobs = [Job(0.0, 8, 10), Job(0.0, 8, 2), Job(1.0, 8, 2)]
    served = serve_statically(jobs, ONE_SECOND, 3 * MAX_MODEL_LEN)  # it would have room, and comes too late
    assert served.latencies == [1.0, 1.0, (12.0 - 1.0) / 2]  # the shorter one first; the last begins at 10
    by_iteration = serve_contiguous(jobs, ONE_SECOND, "max", 2 * MAX_MODEL_LEN, 8)
    assert by_iteration.latencies == [1.0, 1.5, 1.0]  # the last begins at 2


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(SERVERS), st.integers(0, 2**32), st.floats(0.2, 5.0))
def test_every_server_answers_every_request_and_counts_each_slot_once(name, seed, rate):
    jobs = SHAREGPT.jobs(12, rate, seed)
    served = paper_setting().server(name)(jobs)
    assert len(served.latencies) == len(jobs)
    assert served.num_output_tokens == sum(job.num_output_tokens for job in jobs)
    assert all(share >= -1e-9 for share in served.shares.values())
    assert served.mean_rows <= len(jobs)


def test_paged_wastes_less_than_a_block_per_sequence():
    setting = paper_setting()
    served = serve_paged(SHAREGPT.jobs(200, None, seed=0), setting.deployment(16), while_waiting=True)
    assert served.unused_slot_seconds <= 16 * served.row_seconds
    assert served.token_share_of_reserved > 0.96


def test_reservations_know_more_and_take_less():
    chance = random.Random(0)
    for _ in range(100):
        job = Job(0.0, chance.randint(1, 1000), chance.randint(1, 1000))
        oracle, pow2, most = (RESERVATIONS[name](job) for name in ("oracle", "pow2", "max"))
        assert job.num_tokens == oracle <= pow2 <= most
        assert pow2 - job.num_prompt_tokens < 2 * job.num_output_tokens


@pytest.mark.parametrize("width", [2, 4])
def test_parallel_samples_share_the_full_blocks_of_their_prompt(width):
    jobs = ALPACA.typical_jobs(12, seed=0)
    saved = used = 0
    for job in jobs:  # by hand: in each decode step all answers hold the prompt's full blocks together
        for num_tokens in range(job.num_prompt_tokens, job.num_tokens):
            blocks = -(-num_tokens // 16)
            shared = (job.num_prompt_tokens - 1) // 16
            saved += (width - 1) * shared
            used += width * (blocks - shared) + shared
    assert parallel_sampling(ALPACA, width, 12).share == pytest.approx(saved / (saved + used), rel=0.05)
