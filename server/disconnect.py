"""Ends work whose client has gone away. Knows ASGI messages only: not what the work is."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client closed the connection before its answer was complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`, and cancel it as soon as the client is gone. The request's body must have been read.

    Raises:
        ClientDisconnected: if the client left first. `work` has ended by then, its clean-up included.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancellations = task.cancelling()
    has_left = False

    def leave(_: object) -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    watching = asyncio.create_task(_wait_for_disconnect(receive))
    watching.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.cancelling() == num_cancellations + 1:  # nobody else wants it to end
            raise ClientDisconnected from None
        raise
    finally:
        watching.remove_done_callback(leave)
        watching.cancel()
        if has_left:
            task.uncancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
