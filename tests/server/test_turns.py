"""Holders take turns at a few places: against a plain model, with cancellations, and around slow preparations."""

import asyncio
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.preparer import Preparer
from server.turns import Turns
from tests.server.doubles import byte_tokenizer


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@given(
    num_places=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from(["a", "b", "c", "leave", "cancel"]), st.integers(0, 20)), max_size=60),
)
async def test_places_go_round_among_those_who_wait(num_places, moves):
    turns = Turns(num_places)
    seated, waiting, rounds = [], [], []  # tasks that have a place; (holder, task); whose turn it is stands first

    for move, pick in moves:
        if move == "leave" and seated:
            seated.pop(pick % len(seated))
            turns.give_back()
            while waiting and len(seated) < num_places:
                holder = rounds.pop(0)
                place = next(i for i, (each, _) in enumerate(waiting) if each == holder)
                seated.append(waiting.pop(place)[1])
                if any(each == holder for each, _ in waiting):
                    rounds.append(holder)
        elif move == "cancel" and waiting:
            holder, task = waiting.pop(pick % len(waiting))
            task.cancel()
            if not any(each == holder for each, _ in waiting):
                rounds.remove(holder)
        elif len(move) == 1:
            task = asyncio.ensure_future(turns.take(move))
            if len(seated) < num_places and not waiting:
                seated.append(task)
            else:
                waiting.append((move, task))
                if move not in rounds:
                    rounds.append(move)
        await settle()
        assert all(task.done() and not task.cancelled() for task in seated)
        assert not any(task.done() for _, task in waiting)
    for _, task in waiting:
        task.cancel()


@pytest.mark.parametrize("comes_first", [False, True])
async def test_a_turn_that_comes_as_its_waiter_is_cancelled_goes_to_the_next(comes_first):
    turns = Turns(1)
    await turns.take("a")
    leaving, next_one = (asyncio.ensure_future(turns.take(holder)) for holder in "bc")
    await settle()
    if comes_first:
        turns.give_back()  # to b, who does not know it yet
        leaving.cancel()
    else:
        leaving.cancel()  # which b does not know yet
        turns.give_back()
    await settle()
    assert next_one.done() and not next_one.cancelled()


@pytest.mark.parametrize("cancels", [False, True])
async def test_what_one_key_sends_at_once_is_not_read_before_all_that_others_send(cancels):
    """Also when the sender of the burst has gone: what is being read goes on, and what waits does not begin."""
    preparer = Preparer(None, byte_tokenizer())
    begun, may_end = Counter(), threading.Event()

    def read(body, _model):
        begun[body] += 1
        assert may_end.wait(10)
        return body

    burst = [asyncio.ensure_future(preparer.run(read, b"burst", None, "a")) for _ in range(100)]
    async with asyncio.timeout(10):
        while begun.total() < 4:
            await asyncio.sleep(0.001)
        other = asyncio.ensure_future(preparer.run(read, b"other", None, "b"))
        await settle()
        if cancels:
            for task in burst:
                task.cancel()
        may_end.set()
        assert await other == b"other"
        ended = await asyncio.gather(*burst, return_exceptions=True)
    assert begun[b"burst"] == (4 if cancels else 100)
    assert all(isinstance(each, asyncio.CancelledError) if cancels else each == b"burst" for each in ended)
    preparer.stop()


async def test_the_other_keys_turn_comes_among_the_first():
    preparer = Preparer(None, byte_tokenizer())
    order = []

    def read(body, _model):
        order.append(body)

    burst = [preparer.run(read, b"burst", None, "a") for _ in range(200)]
    await asyncio.gather(*burst, preparer.run(read, b"other", None, "b"))
    assert order.index(b"other") < 50
    preparer.stop()
