"""Keeps work on large answers off the event loop, where every other request would wait for it. Knows no work."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_MAX_INLINE = 1024  # values; 2 to 3 µs each where they are scored or encoded. A thread costs a short answer 0.1 ms


def is_large(num_values: int) -> bool:
    """Whether work on so many numbers or tokens is done off the loop."""
    return num_values > _MAX_INLINE


async def off_loop_if_large(num_values: int, work: Callable[[], Result]) -> Result:
    """What `work` returns, which handles so many numbers or tokens. It must be safe to run in a thread."""
    return await asyncio.to_thread(work) if is_large(num_values) else work()
