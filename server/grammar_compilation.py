"""Grammars are compiled beside the step loop, in threads, and the latest ones are kept.

Knows the engine's vocabulary, and its requests by their ids. Must not know the scheduler's queues, or messages.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.grammar import GrammarCompiler, GrammarError, GrammarState, Vocabulary
from scheduler.sampling_params import StructuredOutput
from server.tokenizer import TokenizerError

logger = logging.getLogger("octavo.grammar")

MAX_SECONDS = 10.0  # of compiling; the library's own limits end almost any grammar long before
_MAX_KEPT = 128  # grammars, some 4 MB each
_NUM_THREADS = 2  # so that one that takes long does not keep the others waiting

_Key = tuple[str, str, str | None]


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What has become of the grammar of one request: its beginning, or why there is none."""

    request_id: str
    state: GrammarState | None = None
    message: str = ""
    param: str | None = None


@dataclass(slots=True)
class _Compilation:
    """One grammar in the making, and the requests that wait for it with the fields that ask for it."""

    wanted: StructuredOutput
    waiting: list[tuple[str, str]]
    started: float | None = None  # None: no thread has taken it up


class GrammarCompilation:
    """The grammars of an engine. One thread, that of the step loop, calls its methods."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], vocab_size: int, on_done: Callable[[], None]) -> None:
        """Start nothing yet.

        Args:
            load_vocabulary: called in a thread when the first grammar is asked for. Raises TokenizerError.
            vocab_size: of the model.
            on_done: called from a thread whenever `take_finished` has something to give.
        """
        self._load_vocabulary = load_vocabulary
        self._vocab_size = vocab_size
        self._on_done = on_done
        self._kept: OrderedDict[_Key, GrammarState] = OrderedDict()  # the one used last stands last
        self._compilations: dict[_Key, _Compilation] = {}
        self._to_do: queue.SimpleQueue[_Compilation] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Compilation, GrammarState | str]] = queue.SimpleQueue()
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def request(self, request_id: str, wanted: StructuredOutput) -> CompiledGrammar | None:
        """Ask for a request's grammar. If it is there already it comes at once, else with `take_finished`."""
        key = _key(wanted)
        state = self._kept.get(key)
        if state is not None:
            if any(state.fork().bitmask()):  # in 50 µs
                self._kept.move_to_end(key)
                return CompiledGrammar(request_id, state.fork())
            del self._kept[key]  # its forks share what is computed of it, and one of them reached a bound
        compilation = self._compilations.get(key)
        if compilation is None:
            compilation = self._compilations[key] = _Compilation(wanted, [])
            self._to_do.put(compilation)
            self._start_threads()
        compilation.waiting.append((request_id, wanted.param))
        return None

    def take_finished(self) -> list[CompiledGrammar]:
        """What has become of grammars since the last call."""
        finished: list[CompiledGrammar] = []
        while self._compilations:
            try:
                compilation, outcome = self._done.get_nowait()
            except queue.Empty:
                return finished + self._give_up_slow_ones()
            finished += self._finish(compilation, outcome)
        return finished

    def _finish(self, compilation: _Compilation, outcome: GrammarState | str) -> list[CompiledGrammar]:
        key = _key(compilation.wanted)
        if self._compilations.get(key) is not compilation:
            return []  # it was given up
        del self._compilations[key]
        if isinstance(outcome, str):
            return [
                CompiledGrammar(request_id, message=f"{param} cannot be followed: {outcome}.", param=param)
                for request_id, param in compilation.waiting
            ]
        self._kept[key] = outcome
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return [CompiledGrammar(request_id, outcome.fork()) for request_id, _ in compilation.waiting]

    def _give_up_slow_ones(self) -> list[CompiledGrammar]:
        too_early = time.monotonic() - MAX_SECONDS
        slow = [c for c in self._compilations.values() if c.started is not None and c.started < too_early]
        return [
            grammar for c in slow for grammar in self._finish(c, f"compiling it takes more than {MAX_SECONDS:.0f} s")
        ]

    def _start_threads(self) -> None:
        if len(self._threads) < _NUM_THREADS:
            thread = threading.Thread(target=self._work, name=f"grammar-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            compilation = self._to_do.get()
            self._done.put((compilation, self._compile(compilation)))
            self._on_done()

    def _compile(self, compilation: _Compilation) -> GrammarState | str:
        """The beginning of a grammar, or why there is none."""
        try:
            compiler = self._compiler_of_the_vocabulary()
            compilation.started = time.monotonic()
            return compiler.compile(compilation.wanted)
        except GrammarError as error:
            return str(error)
        except TokenizerError as error:
            logger.error("No grammar can be followed: %s", error)
            return "the model's vocabulary cannot be read"
        except Exception:  # one bad grammar ends no thread, and no request waits for ever
            logger.exception("A grammar could not be compiled.")
            return "compiling it failed"

    def _compiler_of_the_vocabulary(self) -> GrammarCompiler:
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._load_vocabulary(), self._vocab_size)
            return self._compiler


def _key(wanted: StructuredOutput) -> _Key:
    """What makes two grammars the same: not the field that asks for them."""
    return wanted.kind, wanted.value, wanted.whitespace
