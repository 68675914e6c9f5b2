"""The process that tries grammars out before the engine takes them: one that crashes ends nothing else.

Started by server/grammar_trials.py. It builds the vocabulary once and is copied (forked) for each grammar, so that a
grammar costs milliseconds and leaves nothing behind. Each connection is served by a copy that ends when it is closed;
the process itself ends when all of these have. Knows no request.
"""

import os
import resource
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scheduler.grammar import GrammarCompiler, GrammarError, Vocabulary
from scheduler.sampling_params import StructuredOutput
from server.ipc import MessageCodec

# The engine compiles with more of it (see grammar_compilation), and so do the threads that make masks: what was not too
# deep here is not too deep there.
STACK_BYTES = 1 << 20
_NICENESS = 5  # whoever waits for a token goes before a grammar that is not known yet
_MIB = 1 << 20

TOO_LARGE = "it is too deep or too large"
TOO_SLOW = "compiling it takes too long"
FAILS = "compiling it fails"
BUSY = "the machine is too busy to compile it"

# What a stack that is used up, memory that is refused, or a fault of the library's ends a process with. Any other
# signal comes from outside.
_ITS_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGTRAP}


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What one grammar may cost. Of the schemas that people wrote, the most costly one takes 10 ms and 4 MiB."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 10.0  # where the cores are busy with others
    kept_bytes: int = 48 * _MIB  # by the grammar and its first mask
    address_bytes: int = 512 * _MIB  # while it compiles


class TrialSetup(msgspec.Struct, frozen=True):
    """The first message: the vocabulary, and the limits."""

    tokens: list[bytes]
    special_token_ids: list[int]
    vocab_size: int
    limits: TrialLimits


class Outcome(msgspec.Struct, frozen=True):
    """What has become of one grammar: why it is refused, without a full stop, or None; and what it takes."""

    refusal: str | None
    num_bytes: int = 0  # of memory at most, with some 4 MiB that each takes which is not its own
    is_shortage: bool = False  # it is refused for no fault of its own: another time it may not be


def try_out(compiler: GrammarCompiler, wanted: StructuredOutput, limits: TrialLimits) -> Outcome:
    """Compile a grammar in a copy of this process, which has no thread but this one."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, msgspec.msgpack.encode(_compile_within(limits, compiler, wanted)))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        in_time = bool(select.select([pipe], [], [], limits.wall_seconds)[0])
        said = pipe.read() if in_time else b""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if said:
        return msgspec.msgpack.decode(said, type=Outcome)
    return _outcome_of_end(os.WTERMSIG(status) if in_time and os.WIFSIGNALED(status) else None)


def _outcome_of_end(ended_by: int | None) -> Outcome:
    """Of a copy that said nothing, by the signal that ended it, if one did that is not this process's own."""
    if ended_by == signal.SIGPROF:
        return Outcome(TOO_SLOW)
    if ended_by in _ITS_OWN_SIGNALS:
        return Outcome(TOO_LARGE)
    return Outcome(BUSY, is_shortage=True)


def _compile_within(limits: TrialLimits, compiler: GrammarCompiler, wanted: StructuredOutput) -> Outcome:
    """In the copy: whatever ends it, nothing is printed or dumped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _address_bytes() + limits.address_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)  # its signal ends the process
    refusals: list[str] = []

    def compile_and_drop() -> None:
        try:
            compiler.compile(wanted)
        except GrammarError as error:
            refusals.append(str(error))
        except (MemoryError, RecursionError):
            refusals.append(TOO_LARGE)
        except BaseException:  # a panic of the library's is no Exception
            refusals.append(FAILS)

    before = _peak_bytes()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=compile_and_drop)
    thread.start()
    thread.join()
    if refusals:
        return Outcome(refusals[0])
    num_bytes = _peak_bytes() - before
    return Outcome(TOO_LARGE if num_bytes > limits.kept_bytes else None, num_bytes)


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _serve(connection: socket.socket, compiler: GrammarCompiler, limits: TrialLimits) -> None:
    codec = MessageCodec(StructuredOutput)
    with suppress(ConnectionError):  # the engine has gone during a trial
        while isinstance(wanted := codec.receive(connection), StructuredOutput):
            connection.sendall(codec.encode(try_out(compiler, wanted, limits)))


def main() -> None:
    """Serve each of the connections whose descriptors are the arguments; the first one brings the setup."""
    # When to stop is the engine's decision: closing the connections is its word.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICENESS)
    connections = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:]]
    setup = MessageCodec(TrialSetup).receive(connections[0])
    if not isinstance(setup, TrialSetup):
        return
    # How the tokenizer spells a text makes no grammar cheaper or dearer.
    vocabulary = Vocabulary(setup.tokens, setup.special_token_ids, lambda _text: [])
    compiler = GrammarCompiler(vocabulary, setup.vocab_size)
    while connections:
        connection = connections.pop()
        if os.fork() == 0:
            for other in connections:
                other.close()
            _serve(connection, compiler, setup.limits)
            os._exit(0)
        connection.close()  # whoever is at the other end shall see it if its copy of this process ends
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
