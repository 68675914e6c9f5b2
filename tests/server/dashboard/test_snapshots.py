"""Pictures are shared: however many watch, the engine is asked once a second, and less often where it takes it long."""

import asyncio
import gzip

import pytest

from scheduler.pool_report import PoolReport
from server.dashboard.snapshots import SECONDS, PoolSnapshots
from server.engine_errors import EngineUnavailable
from server.messages import PoolInspection


class Asked:
    """In place of the engine's client: counts questions, and answers as it is told to."""

    def __init__(self) -> None:
        self.num_questions = 0
        self.seconds = 0.0
        self.num_blocks = 10_000
        self.is_down = False

    async def inspect_pool(self) -> PoolInspection:
        self.num_questions += 1
        await asyncio.sleep(0)
        if self.is_down:
            raise EngineUnavailable("It is gone.")
        return PoolInspection(self.num_questions, PoolReport(16, bytes(self.num_blocks), (), b""), self.seconds)


@pytest.fixture
def engine():
    return Asked()


@pytest.fixture
def clock():
    return {"now": 100.0}


@pytest.fixture
def snapshots(engine, clock):
    return PoolSnapshots(engine, lambda: clock["now"])


async def test_a_hundred_viewers_ask_once_a_second(snapshots, engine, clock):
    for second in range(1, 4):
        for _ in range(3):
            await asyncio.gather(*(snapshots.newest() for _ in range(100)))
        assert engine.num_questions == second
        clock["now"] += SECONDS


async def test_one_that_takes_the_engine_long_is_kept_for_longer(snapshots, engine, clock):
    engine.seconds = 0.1
    await snapshots.newest()
    for step, expected in ((1.0, 1), (3.9, 1), (0.2, 2)):
        clock["now"] += step
        await snapshots.newest()
        assert engine.num_questions == expected


async def test_the_number_changes_with_the_pool_alone(snapshots, engine, clock):
    first = await snapshots.newest()
    clock["now"] += SECONDS
    assert await snapshots.newest() is first
    clock["now"] += SECONDS
    engine.num_blocks += 1
    changed = await snapshots.newest()
    assert changed.number != first.number
    assert gzip.decompress(changed.packed) == changed.content


async def test_a_small_one_is_not_packed(snapshots, engine):
    engine.num_blocks = 10
    assert (await snapshots.newest()).packed is None


async def test_an_engine_that_is_down_is_asked_once_a_second_too(snapshots, engine, clock):
    number = (await snapshots.newest()).number
    engine.is_down = True
    clock["now"] += SECONDS
    for error in await asyncio.gather(*(snapshots.newest() for _ in range(50)), return_exceptions=True):
        assert isinstance(error, EngineUnavailable) and str(error) == "It is gone."
    assert engine.num_questions == 2
    engine.is_down = False
    clock["now"] += SECONDS
    assert (await snapshots.newest()).number == number


async def test_a_viewer_who_goes_away_leaves_the_others_their_picture(snapshots, engine):
    tasks = [asyncio.create_task(snapshots.newest()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert (await tasks[1]).number == (await tasks[2]).number


async def test_a_server_that_was_started_again_has_other_numbers(snapshots, engine):
    first = (await snapshots.newest()).number
    await asyncio.sleep(0.01)
    assert (await PoolSnapshots(engine).newest()).number > first
