"""Reads and tokenises requests off the event loop: small ones in a thread, large ones in a process beside this one.

In a thread, every C call on a long prompt keeps the GIL for milliseconds, and with it the loop. Knows no request.
"""

import asyncio
import contextvars
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from server.config import engine_environment
from server.errors import ApiError, ServiceUnavailable
from server.ipc import receive_payload, send_payload
from server.log_lines import current_request
from server.preparer_process import READY, TOKENIZER
from server.served_model import ServedModel
from server.tokenizer import Tokenizer
from server.turns import Turns
from server.value_codec import ValueCodec, class_named

logger = logging.getLogger("octavo.preparer")

Prepared = TypeVar("Prepared")

MAX_SMALL = 16 * 1024  # bytes of a body: some 4,000 tokens of text, which take about 2 ms
_NUM_THREADS = 4  # for small ones
_NUM_CONNECTIONS = max(2, min(4, (os.cpu_count() or 1) // 2))  # large requests that are prepared at once
_ANSWER_SECONDS = 60.0  # for the longest body; a process that needs more is stuck, and is replaced
_START_SECONDS = 60.0
_EXIT_SECONDS = 5.0
_PAUSE_SECONDS = 30.0  # before the next try to replace a process, if one has failed


class ProcessLost(Exception):
    """The process ended, or was killed because it did not answer."""


class _Process:
    """One life of the process beside this one, and the connections to it that are free."""

    def __init__(self, model_path: Path, log_options: tuple[str, str]) -> None:
        """Start it, and wait until it has loaded its tokenizer. Raises ProcessLost, or OSError."""
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._connections: list[socket.socket] = []
        with ExitStack() as if_it_fails:
            with ExitStack() as handed_over:
                theirs = []
                for _ in range(_NUM_CONNECTIONS):
                    ours, their = socket.socketpair()
                    self._connections.append(if_it_fails.enter_context(ours))
                    theirs.append(handed_over.enter_context(their).fileno())
                self._popen = _started(model_path, log_options, theirs)
            if_it_fails.callback(self._kill)
            for connection in self._connections:
                connection.settimeout(_START_SECONDS)
                if self._receive(connection) != READY:
                    raise ProcessLost("it is not ready")
                connection.settimeout(_ANSWER_SECONDS)
                self._free.put(connection)
            if_it_fails.pop_all()

    def ask(self, request: bytes, body: bytes) -> bytes:
        """Send a request and wait for its answer. Raises ProcessLost."""
        connection = self._free.get()
        try:
            send_payload(connection, request)
            send_payload(connection, body)
            return self._receive(connection)
        except Exception as error:
            _hang_up(connection)  # before another can take it, who would read the late answer to this request
            raise ProcessLost from error
        finally:
            self._free.put(connection)  # after a failure nobody is answered any more, and all learn it at once

    def end(self) -> None:
        """Close the connections, which ends it; kill it if it does not go."""
        for connection in self._connections:
            _hang_up(connection)  # whoever waits for an answer in another thread is woken
        try:
            self._popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def _receive(self, connection: socket.socket) -> bytes:
        try:
            payload = receive_payload(connection)
        except OSError as error:
            raise ProcessLost(str(error)) from error
        if payload is None:
            raise ProcessLost("it ended")
        return payload


class Preparer:
    """Calls functions that make something of a request's body, off the event loop."""

    def __init__(
        self, model_path: Path | None, tokenizer: Tokenizer, log_level: str = "info", log_format: str = "human"
    ) -> None:
        """`model_path` is where the process finds the tokenizer; None: everything runs in threads of this process."""
        self._model_path = model_path
        self._log_options = (log_level, log_format)
        self._codec = ValueCodec({TOKENIZER: tokenizer})
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "prepare")
        self._waiters = ThreadPoolExecutor(_NUM_CONNECTIONS, "await-preparer")
        self._turns, self._turns_beside = Turns(_NUM_THREADS), Turns(_NUM_CONNECTIONS)
        self._process: _Process | None = None
        self._lock = threading.Lock()  # of `_process` and of when to start it
        self._has_run = False
        self._next_start = 0.0  # not before

    async def run(
        self, function: Callable[[bytes, ServedModel], Prepared], body: bytes, model: ServedModel, holder: str = ""
    ) -> Prepared:
        """What `function`, which stands in a module of ours under its own name, makes of a body. Raises ApiError.

        Its result must be data, with its classes ours (see value_codec). Holders of different keys take turns.
        """
        if len(body) <= MAX_SMALL or self._model_path is None or not _has_a_name(function):
            return await _in_turn(self._turns, holder, self._threads, function, body, model)
        return await _in_turn(self._turns_beside, holder, self._waiters, self._run_beside, function, body, model)

    def start(self) -> None:
        """Start the process before it is needed; takes about a second."""
        with self._lock:
            self._start()

    def stop(self) -> None:
        """End the process. Nothing is prepared any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._waiters.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._model_path = None
            self._end()

    def _run_beside(
        self, function: Callable[[bytes, ServedModel], Prepared], body: bytes, model: ServedModel
    ) -> Prepared:
        with self._lock:
            process = self._start()
        if process is None:
            return function(body, model)
        request = self._codec.encode((function.__module__, function.__qualname__, model, _request_context()))
        try:
            answer = process.ask(request, body)
        except ProcessLost:
            self._replace(process)
            raise ServiceUnavailable("The request took too long to be read, or was lost.", "preparation_lost") from None
        match self._codec.decode(answer):
            case ("done", prepared):
                return prepared
            case ("refused", module, name, fields):
                raise _rebuilt_error(module, name, fields)
            case other:
                raise RuntimeError(f"the preparing process answered {other!r}; its log says more")

    def _start(self) -> _Process | None:
        """The process that runs; None where none can be had, which is said in the log once for each try.

        One that never ran is not tried again. One that did is: what is in the way of the next may pass.
        """
        if self._process is None and self._model_path is not None and time.monotonic() >= self._next_start:
            try:
                self._process = _Process(self._model_path, self._log_options)
                self._has_run = True
            except (ProcessLost, OSError) as error:
                logger.error("The preparing process does not start (%s): long prompts will hold up others.", error)
                self._next_start = time.monotonic() + _PAUSE_SECONDS
                if not self._has_run:
                    self._model_path = None
        return self._process

    def _replace(self, lost: _Process) -> None:
        with self._lock:
            if self._process is lost:
                logger.error("The preparing process ended or did not answer, and is replaced.")
                self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def _started(model_path: Path, log_options: tuple[str, str], descriptors: list[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  # our own program, with a path of ours
        # -P as for the engine: a server.py in the working directory must not run in our package's place.
        [sys.executable, "-P", "-m", "server.preparer_process", str(model_path), *log_options, *map(str, descriptors)],
        pass_fds=descriptors,
        env=engine_environment(),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


async def _in_turn(
    turns: Turns, holder: str, threads: ThreadPoolExecutor, function: Callable[..., Prepared], *arguments: object
) -> Prepared:
    """Call it in a thread. Its place is free again when the thread is, be the caller still there or not."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Prepared] = loop.create_future()

    def finish(result: Callable[[], Prepared]) -> None:
        turns.give_back()
        if not answered.done():  # else the caller has gone
            try:
                answered.set_result(result())
            except BaseException as error:
                answered.set_exception(error)

    def end(future: Future[Prepared]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(finish, future.result)

    await turns.take(holder)
    try:
        # In its context: what is logged there belongs to this request.
        future = threads.submit(contextvars.copy_context().run, function, *arguments)
    except RuntimeError:
        turns.give_back()
        raise
    future.add_done_callback(end)  # one message to the loop tells it all
    return await answered


def _request_context() -> tuple[str | None, ...] | None:
    request = current_request.get()
    return None if request is None else tuple(request)


def _has_a_name(function: Callable[..., object]) -> bool:
    return "." not in function.__qualname__


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _rebuilt_error(module: str, name: str, fields: dict[str, object]) -> ApiError:
    kind = class_named(module, name)
    assert issubclass(kind, ApiError)
    error = kind.__new__(kind)
    error.args = (fields.get("message"),)
    vars(error).update(fields)
    return error
