"""The edge's end of the engine process: starts it, talks to it, restarts it when it dies.

The only file that knows how the engine is reached. Every open request ends: with its last update, a rejection, or
`EngineDied`. Knows no HTTP and no text.
"""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from scheduler.output import SequenceUpdate
from scheduler.request_report import RequestReport
from server.config import engine_environment
from server.engine_config import EngineConfig
from server.engine_connection import EngineConnection
from server.engine_errors import (
    EngineDied,
    EngineRefusedSettings,
    EngineStartError,
    EngineUnavailable,
    RequestDropped,
    RequestRejected,
)
from server.ipc import MessageCodec
from server.messages import (
    Abort,
    EdgeMessage,
    EngineFailure,
    EngineInfo,
    EngineMessage,
    EngineStats,
    Inspect,
    Inspection,
    InspectPool,
    LoadProgress,
    PoolInspection,
    Rejected,
    StepUpdates,
    Submit,
)
from server.update_stream import UpdateStream

logger = logging.getLogger("octavo.engine_client")

_FIRST_RESTART_DELAY = 0.5  # seconds; doubles with each failed start
_MAX_FAILED_STARTS = 5
_EXIT_SECONDS = 5.0  # for a process that was asked to end
_INSPECTION_SECONDS = 5.0  # a step of a large model on a slow machine takes less
_STALLS_UNTIL_DEAD = 4  # stall timeouts of silence after which a hung engine is killed; it speaks even when idle


class EngineClient:
    """One engine process and the requests that are open in it."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[LoadProgress], None] | None = None,
        stall_timeout: float = 30.0,
    ) -> None:
        """Configure; `start` brings the process up.

        Args:
            config: passed to the process as it is.
            on_progress: called while the first start loads the model.
            stall_timeout: seconds of silence after which the engine counts as hung, and `ready` turns false.
        """
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.num_restarts = 0  # times that the process was lost, whether or not it could be started again
        self.draining = False
        self.failed = asyncio.Event()  # it died and cannot be started again
        self.on_report: Callable[[RequestReport], None] | None = None  # called with what became of each request
        self._config = config
        self._on_progress = on_progress
        self._stall_timeout = stall_timeout
        self._codec = MessageCodec(EngineMessage)
        self._streams: dict[str, UpdateStream] = {}
        self._inspections: dict[int, asyncio.Future[Inspection | PoolInspection]] = {}
        self._num_inspections = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._process: asyncio.subprocess.Process | None = None
        self._connection: EngineConnection | None = None
        self._started: asyncio.Future[EngineInfo] | None = None  # while the process starts
        self._last_heard = 0.0
        self._serving = False
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """The engine has loaded its model, takes requests, and has been heard from lately."""
        heard_lately = time.monotonic() - self._last_heard < self._stall_timeout
        return self._serving and not self.draining and heard_lately

    @property
    def num_open_requests(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._streams)

    @property
    def process_id(self) -> int | None:
        """Of the engine process that runs now."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> EngineInfo:
        """Start the process, wait until it can serve, and look after it from then on.

        Raises:
            EngineStartError: with the engine's own words where it said why.
        """
        info = await self._start_process()
        self._supervisor = asyncio.create_task(self._supervise())
        return info

    async def stop(self, timeout: float) -> None:
        """Take no new request, let open ones finish for up to `timeout` seconds, then end the process."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            logger.warning(
                "%d requests were still running after the %.0f s of --shutdown-timeout and were ended.",
                len(self._streams),
                timeout,
            )
        if self._supervisor is not None:
            self._supervisor.cancel()
        self._lose_engine("The server is shutting down.")
        await self._end_process()

    def submit(self, message: Submit) -> UpdateStream:
        """Send a request to the engine.

        Raises:
            EngineUnavailable: if it would not be served.
        """
        if self.draining:
            raise EngineUnavailable("The server is shutting down.")
        if not self._serving:
            raise EngineUnavailable("The engine is starting.")
        if not self.ready:
            raise EngineUnavailable("The engine does not answer.")
        assert message.request_id not in self._streams, f"request id {message.request_id} is in use"
        self._send(message)
        stream = self._streams[message.request_id] = UpdateStream(message.params.n)
        self._idle.clear()
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one of its sequences; nothing more comes of it. One that has ended is no error."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.close(index)
        if not stream.is_open:
            self._forget(request_id)
        with suppress(EngineUnavailable):  # what died has nothing left to abort
            self._send(Abort(request_id, index))

    async def inspect(self, request_ids: Sequence[str]) -> list[RequestReport]:
        """What has happened so far to those of the requests that are live in the engine.

        Raises:
            EngineUnavailable: if it does not answer between two steps, is lost, or is starting.
        """
        answer = await self._ask(lambda number: Inspect(number, list(request_ids)))
        assert isinstance(answer, Inspection)
        return answer.reports

    async def inspect_pool(self) -> PoolInspection:
        """Every KV block and who holds it. Raises EngineUnavailable, as `inspect` does."""
        answer = await self._ask(InspectPool)
        assert isinstance(answer, PoolInspection)
        return answer

    # --- the process ---

    async def _ask(self, question: Callable[[int], Inspect | InspectPool]) -> Inspection | PoolInspection:
        if not self._serving:
            raise EngineUnavailable("The engine is starting.")
        self._num_inspections += 1
        number = self._num_inspections
        self._send(question(number))
        answer = self._inspections[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_INSPECTION_SECONDS):
                return await answer
        except TimeoutError:
            raise EngineUnavailable("The engine is too busy to answer between two steps.") from None
        finally:
            del self._inspections[number]

    def _send(self, message: EdgeMessage | EngineConfig) -> None:
        if self._connection is None or not self._connection.is_open:
            raise EngineUnavailable("The engine died a moment ago and is being restarted.")
        self._connection.send(message)

    async def _start_process(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        started = self._started = loop.create_future()
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = await _spawn(theirs)
            _, connection = await loop.create_connection(lambda: EngineConnection(self._codec, self._take), sock=ours)
        except OSError as error:  # no descriptors, no memory: it may pass
            raise EngineStartError(f"The engine process could not be started: {error}.") from error
        self._connection = connection
        self._send(self._config)
        await asyncio.wait({started, connection.lost}, return_when=asyncio.FIRST_COMPLETED)
        self._started = None
        if not started.done():
            await self._end_process()
            await connection.lost
            raise EngineStartError(f"The engine process ended while it was starting ({self._exit_status()}).")
        if started.exception() is not None:
            await self._end_process()
        return started.result()

    async def _supervise(self) -> None:
        try:
            await self._look_after_process()
        except Exception:
            logger.exception("The engine can no longer be looked after.")
            self._lose_engine("The engine was lost.")
            self.failed.set()

    async def _look_after_process(self) -> None:
        while True:
            await self._lose_process()
            num_open = len(self._streams)
            self._lose_engine("The engine process died while this request was running. Send it again.")
            await self._end_process()
            if self.draining:
                return
            self.num_restarts += 1
            logger.error(
                "The engine process died (%s). %d open requests were ended with an error; restarting it.",
                self._exit_status(),
                num_open,
            )
            if not await self._restart():
                self.failed.set()
                return

    async def _restart(self) -> bool:
        delay = _FIRST_RESTART_DELAY
        for attempt in range(1, _MAX_FAILED_STARTS + 1):
            try:
                info = await self._start_process()
            except EngineStartError as error:
                logger.error("Start %d of %d failed: %s", attempt, _MAX_FAILED_STARTS, error)
                await asyncio.sleep(delay)
                delay *= 2
            else:
                logger.warning("The engine serves again after %.1f s of loading.", info.load_seconds)
                return True
        return False

    async def _lose_process(self) -> None:
        """Wait until the process is gone, or has said nothing for long and is killed. Raises what `_take` raised."""
        assert self._connection is not None
        assert self._process is not None
        lost = self._connection.lost
        patience = self._stall_timeout * _STALLS_UNTIL_DEAD
        while not lost.done():
            silence = time.monotonic() - self._last_heard
            if silence >= patience:
                logger.error("The engine has said nothing for %.0f s and is killed.", patience)
                self._process.kill()
                return
            await asyncio.wait({lost}, timeout=patience - silence)
        await lost

    def _take(self, message: object) -> None:
        """What the engine says, in the moment when it arrives."""
        self._last_heard = time.monotonic()
        match message:
            case StepUpdates():
                if message.stats is not None:
                    self.stats = message.stats
                if self.on_report is not None:
                    for report in message.reports:
                        self.on_report(report)
                for update in message.updates:
                    self._deliver(update)
            case Inspection() | PoolInspection():
                answer = self._inspections.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Rejected():
                stream = self._streams.get(message.request_id)
                if stream is not None:
                    self._forget(message.request_id)
                    stream.fail(_as_error(message))
            case _:
                self._take_of_start(message)

    def _take_of_start(self, message: object) -> None:
        assert self._started is not None, f"a running engine said {message!r}"
        match message:
            case LoadProgress() as progress:
                if self._on_progress is not None:
                    self._on_progress(progress)
            case EngineInfo() as info:
                self.info = info
                self._serving = True
                self._started.set_result(info)
            case EngineFailure(reason):
                self._started.set_exception(EngineRefusedSettings(reason))

    def _deliver(self, update: SequenceUpdate) -> None:
        stream = self._streams.get(update.request_id)
        if stream is None:
            return
        stream.put(update)
        if not stream.is_open:
            self._forget(update.request_id)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)  # whoever took its last update may have given it up
        if not self._streams:
            self._idle.set()

    def _lose_engine(self, reason: str) -> None:
        self._serving = False
        self.stats = None  # what it last said of its load is true no more
        for answer in self._inspections.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(reason))
        for request_id, stream in list(self._streams.items()):
            self._forget(request_id)
            stream.fail(EngineDied(reason))

    async def _end_process(self) -> None:
        """Close the connection, which ends the process; kill it if it does not go."""
        if self._connection is not None:
            self._connection.close()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _exit_status(self) -> str:
        code = self._process.returncode if self._process is not None else None
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"


def _as_error(rejected: Rejected) -> Exception:
    if rejected.cause is not None:
        return RequestDropped(rejected.message, rejected.cause, rejected.retry_after)
    if rejected.is_shortage:
        return EngineUnavailable(rejected.message)
    return RequestRejected(rejected.message, rejected.param)


async def _spawn(connection: socket.socket) -> asyncio.subprocess.Process:
    """Start the engine process with the other end of the connection. Raises OSError.

    -P keeps the working directory off its import path: a server.py there must not run in our package's place. In a
    session of its own it does not get the terminal's signals.
    """
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "server.engine_process", str(connection.fileno())),
        pass_fds=[connection.fileno()],
        env=engine_environment(),
        start_new_session=True,
    )
