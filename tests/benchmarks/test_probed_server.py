"""The probe of the event loop tells what the process did from what it waited for."""

import asyncio
import time

from benchmarks.probed_server import LoopProbe


async def test_the_probe_sees_who_holds_the_loop():
    probe = LoopProbe()
    probe.take()
    await asyncio.sleep(0.01)
    probe.take()
    ends = time.process_time() + 0.05
    while time.process_time() < ends:
        pass
    await asyncio.sleep(0.01)
    gaps, ours = probe.take()
    assert max(gaps) >= 0.05
    assert max(ours) >= 0.05
    time.sleep(0.05)  # the loop stands still, and the process does nothing
    await asyncio.sleep(0.01)
    gaps, ours = probe.take()
    assert max(gaps) >= 0.05
    assert max(ours) < 0.05
