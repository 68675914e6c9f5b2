"""Asks the inspector's process, which is started when somebody looks and ended when nobody has for a while.

One question at a time; whatever becomes of that process, the server and its engine stay as they are. Knows no HTTP.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from server.config import engine_environment
from server.dashboard.inspection_messages import (
    GONE,
    Answer,
    InspectionRefused,
    InspectorSetup,
    InspectPrompt,
    Question,
)
from server.engine_config import EngineConfig
from server.errors import InternalError, InvalidRequest, RequestNotFound, ServiceUnavailable, TooManyRequests
from server.ipc import MessageCodec
from server.messages import EngineInfo

logger = logging.getLogger("octavo.inspector")

IDLE_SECONDS = 300.0
_ANSWER_SECONDS = 180.0  # for the longest question, the model's load included, on busy processors
_MAX_WAITING = 4  # questions
_EXIT_SECONDS = 5.0
_NICENESS = 10  # whoever waits for a token goes before whoever looks at one


class _Process:
    """One life of the process. Threads other than the one that asks may kill it."""

    def __init__(self, setup: InspectorSetup, answer_seconds: float) -> None:
        """Start it. Raises OSError."""
        self._codec = MessageCodec(Answer)
        ours, theirs = socket.socketpair()
        # No GPU: it would take memory that is the engine's. Few threads: so are the processors.
        environment = engine_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(setup.num_threads)}
        try:
            self._popen = subprocess.Popen(  # noqa: S603  # our own program
                # -P as for the engine: a server.py in the working directory must not run in our package's place.
                [sys.executable, "-P", "-m", "server.dashboard.inspection_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        with suppress(OSError):  # a sandbox that forbids it; all else works
            os.setpriority(os.PRIO_PROCESS, self._popen.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        ours.settimeout(answer_seconds)
        self._connection = ours
        ours.sendall(self._codec.encode(setup))

    def ask(self, question: Question) -> Answer | None:
        """Its answer; None where it has ended. Raises TimeoutError where it takes too long."""
        try:
            self._connection.sendall(self._codec.encode(question))
            answer = self._codec.receive(self._connection)
        except ConnectionError:
            return None
        return answer  # type: ignore[return-value]  # the codec decodes Answer alone

    def kill(self) -> None:
        """Let it do nothing more."""
        self._popen.kill()

    def end(self) -> int:
        """Close the connection, which ends it; kill it if it does not go. Returns its exit status."""
        with suppress(OSError):  # the other end is gone already
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            status = self._popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            status = self._popen.wait()
        self._connection.close()
        return status

    @property
    def process_id(self) -> int:
        """While it runs."""
        return self._popen.pid


class Inspector:
    """The process while there is one, and who waits for it."""

    def __init__(
        self, config: EngineConfig, idle_seconds: float = IDLE_SECONDS, answer_seconds: float = _ANSWER_SECONDS
    ) -> None:
        """Inspect the model of an engine with this configuration. Nothing is started."""
        self._config = config
        self._idle_seconds = idle_seconds
        self._answer_seconds = answer_seconds
        self._thread = ThreadPoolExecutor(1, "inspector")  # all but `stop` happens there, so one thing at a time
        self._num_open = 0  # questions
        self._idle_timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()  # of the two below, which `stop` changes beside the thread
        self._process: _Process | None = None
        self._is_stopped = False

    @property
    def process_id(self) -> int | None:
        """Of the process that runs now."""
        process = self._process
        return None if process is None else process.process_id

    async def ask(self, question: Question, info: EngineInfo) -> Answer:
        """The answer of the process, which is started where there is none.

        Raises:
            TooManyRequests: others wait already.
            RequestNotFound: what the question is about is not kept any more.
            InvalidRequest: the question is about a layer, a head or a position that there is not.
            ServiceUnavailable: the model cannot be loaded beside the engine, or the process was lost.
            InternalError: it failed; its log says why.
        """
        if self._is_stopped:
            raise _shutting_down()
        if self._num_open > _MAX_WAITING:
            raise TooManyRequests("The inspector is busy with the questions of others.", "inspector_busy")
        self._num_open += 1
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._thread, self._ask, question, info)
        finally:
            self._num_open -= 1
            if self._num_open == 0 and not self._is_stopped:
                self._idle_timer = loop.call_later(self._idle_seconds, self._thread.submit, self._end_idle)
        if isinstance(answer, InspectionRefused):
            raise _as_error(answer)
        return answer

    async def stop(self) -> None:
        """End the process at once. Whoever waits gets ServiceUnavailable."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()  # its thread, which may wait for an answer, wakes up
        await asyncio.to_thread(self._thread.shutdown)  # those that wait are refused one after the other
        if self._process is not None:
            await asyncio.to_thread(self._process.end)
            self._process = None

    def _ask(self, question: Question, info: EngineInfo) -> Answer:
        if self._process is None and not isinstance(question, InspectPrompt):
            return GONE  # with the process that knew it; one that starts now would know nothing
        try:
            process = self._started(info)
            answer = process.ask(question)
        except TimeoutError:
            self._end(f"it took more than {self._answer_seconds:.0f} s for an answer")
            raise ServiceUnavailable(
                f"The inspector took more than {self._answer_seconds:.0f} s, its time for loading the model "
                "and for a prompt: the machine is busy, or the model large. Try a shorter prompt, or later.",
                "inspector_timeout",
            ) from None
        except OSError as error:
            logger.error("The inspector's process cannot be started: %s", error)
            raise ServiceUnavailable("The inspector cannot be started; the log says why.", "inspector_lost") from None
        if answer is None:
            self._end("it ended while it was asked")
            raise ServiceUnavailable(
                "The inspector ended while it worked on this; it starts anew with the next question.", "inspector_lost"
            )
        if isinstance(answer, InspectionRefused) and answer.cause == "unavailable":
            self._end(None)
        return answer

    def _started(self, info: EngineInfo) -> _Process:
        with self._lock:
            if self._is_stopped:
                raise _shutting_down()
            if self._process is None:
                setup = InspectorSetup(self._config, info.device, info.quantization, _num_threads())
                self._process = _Process(setup, self._answer_seconds)
            return self._process

    def _end(self, complaint: str | None) -> None:
        process = self._process
        assert process is not None, "what is ended was started"
        if complaint is not None:
            process.kill()
        status = process.end()
        with self._lock:
            self._process = None
        if complaint is not None and not self._is_stopped:
            logger.error("The inspector's process is gone: %s (exit status %d).", complaint, status)

    def _end_idle(self) -> None:
        if self._process is not None and self._num_open == 0:
            self._end(None)


def _shutting_down() -> ServiceUnavailable:
    return ServiceUnavailable("The server is shutting down.", "engine_unavailable")


def _as_error(refusal: InspectionRefused) -> Exception:
    match refusal.cause:
        case "unavailable":
            return ServiceUnavailable(f"The inspector has no model: {refusal.message}", "inspector_unavailable")
        case "gone":
            return RequestNotFound(refusal.message)
        case "out_of_range":
            return InvalidRequest(refusal.message)
        case "failed":
            return InternalError(refusal.message)


def _num_threads() -> int:
    """A quarter of the processors, and at least one: the rest is the engine's."""
    return max(1, len(os.sched_getaffinity(0)) // 4)
