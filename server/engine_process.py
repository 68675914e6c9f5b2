"""The process around the engine: messages in, steps, messages out. Started by server/engine_client.py.

It ends when the edge closes the connection, so that a dead edge never leaves an engine behind.
"""

import logging
import queue
import signal
import socket
import sys
import threading
import time

from kernels.attention.backend import BackendUnavailableError
from models.errors import ModelError
from models.memory import NotEnoughMemory
from scheduler.admission import RequestRefused
from server.engine import Engine, build_engine
from server.engine_config import EngineConfig
from server.engine_sizing import UnservableSettings
from server.garbage_collection import spare_collections
from server.ipc import MessageCodec
from server.logging_setup import configure_logging
from server.messages import (
    Abort,
    EdgeMessage,
    EngineFailure,
    EngineMessage,
    Inspect,
    Inspection,
    InspectPool,
    LoadProgress,
    PoolInspection,
    Rejected,
    StepUpdates,
    Submit,
)

logger = logging.getLogger("octavo.engine")

# An idle engine says that it lives this often; a busy one does with every step.
HEARTBEAT_SECONDS = 1.0
_STATS_SECONDS = 0.02  # between two statistics of a busy engine: nobody looks more often, and they cost a step 50 µs
_MIN_MESSAGE_SECONDS = 0.005  # between two steps, should there be as many messages


class Woken:
    """In the inbox: the engine itself has something to do."""


class Outbox:
    """Sends at once what the connection takes, and the rest from a thread: a slow edge never holds up a step.

    For one thread that sends: it hands a message to the kernel before it goes on, and nobody need be woken for that.
    """

    def __init__(self, connection: socket.socket, codec: MessageCodec) -> None:
        """Start the thread."""
        self._connection = connection
        self._codec = codec
        self._rest: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self._num_handed_over = 0  # to the thread
        self._num_sent = 0  # by the thread, which alone changes it
        self._thread = threading.Thread(target=self._send_rest, name="outbox", daemon=True)
        self._thread.start()

    def send(self, message: EngineMessage) -> None:
        """Send a message, or as much of it as there is room for now, and the rest as soon as there is."""
        frame = self._codec.encode(message)
        num_sent = 0
        if self._num_sent == self._num_handed_over:  # else it would overtake what the thread still has
            try:
                num_sent = self._connection.send(frame, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except ConnectionError:
                return  # the edge is gone; the inbox sees it too and ends the process
        if num_sent < len(frame):
            self._num_handed_over += 1
            self._rest.put(memoryview(frame)[num_sent:])

    def close(self) -> None:
        """Send what is left, then end the thread."""
        self._rest.put(None)
        self._thread.join(timeout=5.0)

    def _send_rest(self) -> None:
        try:
            while (rest := self._rest.get()) is not None:
                self._connection.sendall(rest)
                self._num_sent += 1
        except ConnectionError:
            return  # the edge is gone; the inbox sees it too and ends the process
        except BaseException:
            # An engine that cannot speak must not go on: the inbox then finds the connection closed.
            self._connection.shutdown(socket.SHUT_RDWR)
            raise


class Inbox:
    """Receives in a thread of its own, so that what arrived during a step is there at once after it."""

    def __init__(self, connection: socket.socket, codec: MessageCodec) -> None:
        """Start the thread."""
        self._connection = connection
        self._codec = codec
        self._messages: queue.SimpleQueue[EdgeMessage | Woken | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive_all, name="inbox", daemon=True).start()

    def wake(self) -> None:
        """Let `take` return, from any thread."""
        self._messages.put(Woken())

    def take(self, timeout: float) -> EdgeMessage | Woken:
        """The next message.

        Raises:
            queue.Empty: if none came within `timeout` seconds.
            ConnectionError: if the edge is gone.
        """
        message = self._messages.get(timeout=timeout) if timeout > 0 else self._messages.get_nowait()
        if message is None:
            raise ConnectionError("the edge closed the connection")
        return message

    def _receive_all(self) -> None:
        try:
            while (message := self._codec.receive(self._connection)) is not None:
                self._messages.put(message)  # type: ignore[arg-type]  # the codec decodes EdgeMessage alone
        finally:
            self._messages.put(None)


def run_loop(engine: Engine, inbox: Inbox, outbox: Outbox) -> None:
    """Step while there is work, else wait for messages; close the engine when the edge is gone."""
    last_sent = time.monotonic()
    last_stats = last_sent - HEARTBEAT_SECONDS  # none has been sent
    checked = True
    step_seconds = 0.0
    while True:
        try:
            _take_messages(engine, inbox, outbox, step_seconds)
        except ConnectionError:
            engine.close()
            return
        _send_rejected(engine, outbox)
        if engine.has_unfinished:
            began = time.monotonic()
            updates, checked = engine.step(), False
            step_seconds = time.monotonic() - began
            _send_rejected(engine, outbox)
        else:
            updates = []
            if not checked:
                engine.check_integrity()
                checked = True
        reports = engine.take_reports()
        now = time.monotonic()
        if updates or reports or now - last_sent >= HEARTBEAT_SECONDS:
            if reports or not engine.has_unfinished or now - last_stats >= _STATS_SECONDS:
                stats, last_stats = engine.stats, now
            else:
                stats = None
            outbox.send(StepUpdates(updates, stats, reports))
            last_sent = now


def _send_rejected(engine: Engine, outbox: Outbox) -> None:
    for rejected in engine.take_rejected():
        outbox.send(rejected)


def _take_messages(engine: Engine, inbox: Inbox, outbox: Outbox, step_seconds: float) -> None:
    """Handle everything that has arrived; wait for it a heartbeat long where there is nothing else to do.

    Where there is, messages get no more time than the last step had: a flood of requests, most of which find no room,
    would hold up everybody else's tokens for as long as it lasts.
    """
    timeout = 0.0 if engine.has_unfinished else HEARTBEAT_SECONDS
    ends: float | None = None
    while ends is None or time.monotonic() < ends or not engine.has_unfinished:
        try:
            message = inbox.take(timeout)
        except queue.Empty:
            return
        timeout = 0.0
        if ends is None:
            ends = time.monotonic() + max(step_seconds, _MIN_MESSAGE_SECONDS)
        match message:
            case Submit():
                try:
                    engine.submit(message)
                except RequestRefused as refused:
                    outbox.send(Rejected(message.request_id, str(refused), refused.param))
            case Abort():
                engine.abort(message.request_id, message.index)
            case Inspect():
                outbox.send(Inspection(message.number, engine.inspect(message.request_ids)))
            case InspectPool():
                began = time.monotonic()
                report = engine.inspect_pool()
                outbox.send(PoolInspection(message.number, report, time.monotonic() - began))


def main() -> None:
    """Serve the edge at the other end of the socket whose descriptor is the first argument."""
    # Control-C reaches the whole terminal, and service managers signal the whole group: when to stop is the edge's
    # decision, and closing the connection is its word.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    config = MessageCodec(EngineConfig).receive(connection)
    if not isinstance(config, EngineConfig):
        return
    configure_logging(config.log_level, config.log_format, "engine")
    codec = MessageCodec(EdgeMessage)
    outbox, inbox = Outbox(connection, codec), Inbox(connection, codec)
    try:
        engine = build_engine(
            config, lambda stage, done, total: outbox.send(LoadProgress(stage, done, total)), inbox.wake
        )
    except (ModelError, BackendUnavailableError, UnservableSettings, NotEnoughMemory) as failure:
        outbox.send(EngineFailure(str(failure)))
        outbox.close()
        sys.exit(1)
    outbox.send(engine.info)
    spare_collections()
    run_loop(engine, inbox, outbox)


if __name__ == "__main__":
    main()
