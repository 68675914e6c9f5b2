"""Tries grammars out in a process beside the engine, which survives them whatever they are.

Keeps what has become of each for a while, since the same grammars come again and again. Knows no request.
"""

import hashlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from scheduler.grammar import Vocabulary
from scheduler.sampling_params import StructuredOutput
from server.grammar_trial_process import Outcome, TrialLimits, TrialSetup
from server.ipc import MessageCodec

logger = logging.getLogger("octavo.grammar")

NUM_AT_ONCE = 4  # so that some that take long do not keep the others waiting
_START_SECONDS = 60.0  # until it has built the vocabulary, on a busy machine
_END_SECONDS = 3.0  # before it is killed; the edge gives the engine 5 s in all
_MAX_REMEMBERED = 4096  # some 200 bytes each


class TrialLost(Exception):
    """The process ended, or does not answer."""


class _Process:
    """One life of the process, and the connections to it that are free."""

    def __init__(self, setup: TrialSetup) -> None:
        """Start it; it takes its time in the background. Raises OSError."""
        from server.config import engine_environment  # here alone: pydantic would delay the engine's start

        pairs = [socket.socketpair() for _ in range(NUM_AT_ONCE)]
        theirs = [their.fileno() for _, their in pairs]
        self._connections = [ours for ours, _ in pairs]
        self._codec = MessageCodec(Outcome)
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._popen = subprocess.Popen(  # noqa: S603  # our own program
            # -P as for the engine: a server.py in the working directory must not run in our package's place.
            [sys.executable, "-P", "-m", "server.grammar_trial_process", *map(str, theirs)],
            pass_fds=theirs,
            env=engine_environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for ours, their in pairs:
            their.close()
            ours.settimeout(_START_SECONDS + setup.limits.wall_seconds)
            self._free.put(ours)
        self._connections[0].sendall(self._codec.encode(setup))

    def ask(self, wanted: StructuredOutput) -> Outcome:
        """Have a grammar tried out. Raises TrialLost."""
        connection = self._free.get()
        outcome = None
        try:
            connection.sendall(self._codec.encode(wanted))
            outcome = self._codec.receive(connection)
        except OSError as error:
            raise TrialLost from error
        finally:
            if outcome is None:
                _shut_down(connection)  # or a late answer would be taken for that to the next grammar
            self._free.put(connection)  # after a failure nobody is answered any more, and all learn it at once
        if not isinstance(outcome, Outcome):
            raise TrialLost
        return outcome

    def end(self) -> None:
        """Close the connections, which ends the process and its copies; kill them if they do not go."""
        for connection in self._connections:
            _shut_down(connection)  # whoever waits for an answer in another thread is woken
        try:
            self._popen.wait(_END_SECONDS)  # it waits for its copies, which would be left to nobody otherwise
        except subprocess.TimeoutExpired:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        for connection in self._connections:
            connection.close()


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # it is already, or the other end is gone
        connection.shutdown(socket.SHUT_RDWR)


class GrammarTrials:
    """Whether grammars can be followed. Threads may call `try_out` at once."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, limits: TrialLimits | None = None) -> None:
        """Start the process. Raises OSError."""
        self._setup = TrialSetup(
            list(vocabulary.tokens), list(vocabulary.special_token_ids), vocab_size, limits or TrialLimits()
        )
        self._lock = threading.Lock()  # of all below
        self._process: _Process | None = _Process(self._setup)
        self._outcomes: OrderedDict[bytes, Future[Outcome]] = OrderedDict()  # the one used last stands last

    def try_out(self, wanted: StructuredOutput) -> Outcome:
        """Whether a grammar can be followed. Raises TrialLost, or OSError."""
        key = _key(wanted)
        with self._lock:
            outcome = self._outcomes.get(key)
            is_known = outcome is not None
            if outcome is None:
                outcome = self._outcomes[key] = Future()
                if len(self._outcomes) > _MAX_REMEMBERED:
                    self._outcomes.popitem(last=False)
            self._outcomes.move_to_end(key)
        if not is_known:
            self._settle(key, outcome, wanted)
        return outcome.result()

    def close(self) -> None:
        """End the process. Nothing is tried out any more."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _settle(self, key: bytes, outcome: Future[Outcome], wanted: StructuredOutput) -> None:
        """Try a grammar out for all that ask for it; a failure that is none of its own is not remembered."""
        try:
            result = self._ask(wanted)
        except BaseException as error:  # whoever waits for it must hear of it
            self._forget(key)
            outcome.set_exception(error)
        else:
            if result.is_shortage:
                self._forget(key)
            outcome.set_result(result)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._outcomes.pop(key, None)

    def _ask(self, wanted: StructuredOutput) -> Outcome:
        """Once more where the process was lost: it may have been another grammar's doing, or nobody's."""
        process = self._running()
        try:
            return process.ask(wanted)
        except TrialLost:
            self._replace(process)
            return self._running().ask(wanted)

    def _running(self) -> _Process:
        with self._lock:
            if self._process is None:
                raise TrialLost
            return self._process

    def _replace(self, lost: _Process) -> None:
        with self._lock:
            if self._process is not lost:
                return  # another thread has done it, or it was closed
            logger.error("The process that tries grammars out ended or did not answer, and is replaced.")
            self._process = _Process(self._setup)
        lost.end()  # may take a while, and nobody else has to wait for it


def _key(wanted: StructuredOutput) -> bytes:
    """What makes two grammars the same: not the field that asks for them."""
    return hashlib.sha256(msgspec.msgpack.encode((wanted.kind, wanted.value, wanted.whitespace))).digest()
