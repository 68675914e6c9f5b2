"""Who gives way, who goes first, and whether to swap: tables of cases over real block tables."""

from random import Random
from types import SimpleNamespace

import pytest

from paged_cache.block_table import BlockTable
from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.policy import Victims, goes_before, is_swap_cheaper, least_that_make_room, serving_order

MANAGER = pytest.fixture(name="manager")(lambda: BlockManager(num_blocks=100, block_size=4))


def running(manager, seq_id, num_computed_tokens=10, num_preemptions=0, arrival_time=0.0, priority=0, shares=None):
    """A sequence with blocks of its own, or with the first `shares[1]` tokens' blocks of another."""
    table = BlockTable() if shares is None else manager.fork(shares[0].block_table, shares[1])
    manager.allocate(table, len(table) * 4, num_computed_tokens)
    return SimpleNamespace(
        seq_id=seq_id,
        num_computed_tokens=num_computed_tokens,
        num_preemptions=num_preemptions,
        priority=priority,
        block_table=table,
        request=SimpleNamespace(arrival_time=arrival_time),
    )


def victim_id(manager, *sequences, max_preemptions=2):
    return Victims(sequences, manager, max_preemptions).take().seq_id


def test_the_least_computed_work_is_thrown_away(manager):
    assert victim_id(manager, running(manager, 1, 30), running(manager, 2, 5), running(manager, 3, 20)) == 2


def test_of_equals_the_latest_arrival_gives_way(manager):
    arrivals = [running(manager, i, arrival_time=time) for i, time in [(1, 1.0), (2, 3.0), (3, 2.0)]]
    assert victim_id(manager, *arrivals) == 2
    assert victim_id(manager, running(manager, 1), running(manager, 2)) == 2


def test_a_lower_class_gives_way_first_whatever_it_loses(manager):
    assert victim_id(manager, running(manager, 1, 3), running(manager, 2, 50, priority=1)) == 2


def test_what_others_hold_too_is_not_lost(manager):
    long = running(manager, 1, 40)
    child = running(manager, 2, 41, shares=(long, 40))
    assert victim_id(manager, long, child, running(manager, 3, 8)) == 2  # it loses one token


def test_who_frees_no_block_gives_way_only_if_all_are_so(manager):
    first = running(manager, 1, 8)
    second = running(manager, 2, 8, shares=(first, 8))
    assert victim_id(manager, first, second, running(manager, 3, 30)) == 3
    assert victim_id(manager, first, second) == 2


def test_who_was_preempted_often_is_spared_while_another_is_left(manager):
    spared = running(manager, 1, 5, num_preemptions=2)
    assert victim_id(manager, spared, running(manager, 2, 50, num_preemptions=1)) == 2
    assert victim_id(manager, spared, running(manager, 2, 50, num_preemptions=9)) == 1
    nothing_lost = running(manager, 3, 0, num_preemptions=9)
    manager.allocate(nothing_lost.block_table, 0, 4)
    assert victim_id(manager, nothing_lost, running(manager, 2, 50, num_preemptions=1)) == 3


@pytest.mark.parametrize("seed", range(20))
def test_one_after_another_gives_way_as_if_all_were_looked_at_each_time(manager, seed):
    random = Random(seed)
    left = []
    for seq_id in range(1, 16):
        shares = (random.choice(left), 4 * random.randint(0, 2)) if left and random.random() < 0.7 else None
        num_tokens = random.randint(8, 16)
        left.append(running(manager, seq_id, num_tokens, random.choice([0, 0, 5]), 0.0, random.choice([0, 1]), shares))
    victims = Victims(left, manager, 2)
    while left:
        victim = victims.take()
        assert victim.seq_id == victim_id(manager, *left)
        left.remove(victim)
        manager.free(victim.block_table)


@pytest.mark.parametrize(
    ("num_short", "needs_slot", "chosen"),
    [(1, False, [1]), (3, False, [1]), (4, False, [1, 2]), (6, True, [1, 2]), (7, False, []), (0, True, [1]),
     (-5, True, [1]), (0, False, [])],
)  # fmt: skip
def test_no_more_give_way_than_make_room_and_nobody_for_nothing(manager, num_short, needs_slot, chosen):
    candidates = [running(manager, 1, 10), running(manager, 2, 10)]  # three blocks each
    made = least_that_make_room(candidates, num_short, manager, needs_slot=needs_slot)
    assert [s.seq_id for s in made] == chosen


def test_who_frees_no_block_makes_room_only_as_a_sequence(manager):
    first = running(manager, 1, 8)
    candidates = [running(manager, 2, 8, shares=(first, 8)), running(manager, 3, 8)]
    assert [s.seq_id for s in least_that_make_room(candidates, 1, manager, needs_slot=False)] == [3]
    assert [s.seq_id for s in least_that_make_room(candidates, 0, manager, needs_slot=True)] == [2]


def test_who_shares_blocks_makes_room_with_all_that_hold_them(manager):
    first = running(manager, 1, 10)  # three blocks, two of them of both
    pair = [first, running(manager, 2, 10, shares=(first, 8))]
    for num_short, chosen in ((1, [1]), (2, [1, 2]), (4, [1, 2]), (5, [])):
        made = least_that_make_room(pair, num_short, manager, needs_slot=False)
        assert [s.seq_id for s in made] == chosen
    outsider = running(manager, 3, 8, shares=(first, 8))
    assert least_that_make_room(pair, 3, manager, needs_slot=False) == []
    assert len(least_that_make_room([*pair, outsider], 3, manager, needs_slot=False)) == 3


def test_blocks_that_whoever_is_to_be_admitted_shares_make_no_room(manager):
    candidates = [running(manager, 1, 12), running(manager, 2, 12)]
    needed = set(candidates[0].block_table.block_ids)
    for num_short, chosen in ((1, [2]), (3, [2]), (4, [])):
        made = least_that_make_room(candidates, num_short, manager, needs_slot=False, needed_blocks=needed)
        assert [s.seq_id for s in made] == chosen
    assert len(least_that_make_room(candidates, 8, manager, needs_slot=False, num_spare=1)) == 2


@pytest.mark.parametrize(
    ("per_token", "per_block", "is_cheaper"),
    [(0.0, 0.0, False), (1.0, 0.0, True), (1.0, 1.6, True), (1.0, 1.7, False), (0.0, 1.0, False)],
)
def test_a_swap_there_and_back_is_weighed_against_the_tokens_to_compute(manager, per_token, per_block, is_cheaper):
    config = SchedulerConfig(1, 1, 1, recompute_seconds_per_token=per_token, swap_seconds_per_block=per_block)
    assert is_swap_cheaper(running(manager, 1, 10), manager, config) == is_cheaper  # 2 x 3 blocks, 10 tokens


def test_tokens_in_shared_blocks_need_no_swap(manager):
    config = SchedulerConfig(1, 1, 1, recompute_seconds_per_token=1.0, swap_seconds_per_block=1.0)
    owner = running(manager, 1, 40)
    assert is_swap_cheaper(owner, manager, config)
    assert not is_swap_cheaper(running(manager, 2, 40, shares=(owner, 40)), manager, config)


def waiting(seq_id, arrival_time, priority=0, first=None, index=0):
    request = SimpleNamespace(arrival_time=arrival_time, first_seq_id=seq_id if first is None else first)
    return SimpleNamespace(seq_id=seq_id, index=index, priority=priority, request=request)


def test_the_lowest_priority_number_goes_first_then_the_earliest_arrival_then_who_was_added_first():
    queue = [waiting(1, 3.0), waiting(2, 5.0, priority=-1), waiting(3, 1.0, priority=1), waiting(4, 2.0)]
    queue += [waiting(5, 2.0), waiting(7, 2.0, first=4, index=2), waiting(6, 2.0, first=4, index=1)]
    assert [s.seq_id for s in sorted(queue, key=serving_order)] == [2, 4, 6, 7, 5, 1, 3]


@pytest.mark.parametrize(
    ("priority", "below_share", "is_first"),
    [(0, set(), False), (0, {"a", "b"}, False), (0, {"a"}, True), (0, {"b"}, False), (-1, set(), True),
     (1, {"a"}, False)],
)  # fmt: skip
def test_a_preempted_one_goes_first_but_for_class_and_share(priority, below_share, is_first):
    newcomer = SimpleNamespace(request=SimpleNamespace(tenant="a"))
    preempted = SimpleNamespace(request=SimpleNamespace(tenant="b"))
    assert goes_before(newcomer, preempted, (priority, 0), below_share.__contains__) == is_first
