"""How late the event loop comes to what is due."""

import asyncio
import time

from server.loop_lag import LoopLag


async def test_a_blocked_loop_is_seen_and_measuring_can_end():
    seen: list[float] = []
    lag = LoopLag(seen.append, interval=0.01)
    lag.start()
    while len(seen) < 3:
        await asyncio.sleep(0.001)
    time.sleep(0.1)
    await asyncio.sleep(0.001)
    assert max(seen) >= 0.08  # a timer was due within the first 0.01 s, or had just come
    assert all(seconds >= 0 for seconds in seen)
    lag.stop()
    num_seen = len(seen)
    await asyncio.sleep(0.05)
    assert len(seen) == num_seen
