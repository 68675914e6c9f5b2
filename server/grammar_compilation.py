"""Grammars are compiled beside the step loop, in threads, once they have been tried out where they can harm nobody.

Each request gets a grammar of its own: what is computed while one is followed counts against its limits, and stays in
memory as long as it is. Knows the engine's vocabulary, and its requests by their ids; no queues, and no messages.
"""

import logging
import queue
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.grammar import GrammarCompiler, GrammarError, GrammarState, Vocabulary
from scheduler.sampling_params import StructuredOutput
from server.grammar_trial_process import STACK_BYTES
from server.grammar_trials import NUM_AT_ONCE, GrammarTrials, TrialLost
from server.tokenizer import TokenizerError

logger = logging.getLogger("octavo.grammar")

MAX_SECONDS = 60.0  # until a grammar is there, with all of the waiting
_SMALL_BYTES = 8 << 20  # grammars that take no more are not counted: people's own do not
_LARGE_BYTES = 1 << 30  # that all the others may take at once, of requests that wait as well as of those that run
_MAX_OF_ONE = NUM_AT_ONCE // 2  # at once, of a request of many prompts: some threads are left to others
_STACK_BYTES = 8 * STACK_BYTES  # of memory that is only taken if it is used

Trials = Callable[[Vocabulary, int], GrammarTrials]


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What has become of the grammar of one request: its beginning, or why there is none."""

    request_id: str
    state: GrammarState | None = None
    message: str = ""
    param: str | None = None
    is_shortage: bool = False  # there may be one another time


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why there is no grammar, without a full stop."""

    reason: str
    is_shortage: bool


class _LargeGrammars:
    """Counts the memory of large grammars, for as long as they are in use."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._lock = threading.RLock()  # a lease may end inside, if the garbage collector comes by

    def lease(self, num_bytes: int) -> "_Lease | None":
        """Something to be kept as long as the grammar is; None if it would be too much."""
        if num_bytes <= _SMALL_BYTES:
            return _Lease()
        with self._lock:
            if self._num_bytes + num_bytes > _LARGE_BYTES:
                return None
            self._num_bytes += num_bytes
        lease = _Lease()
        weakref.finalize(lease, self._release, num_bytes)
        return lease

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes


class _Lease:
    """Stands for the memory of one grammar."""


@dataclass(slots=True, eq=False)
class _Compilation:
    """One grammar in the making."""

    request_id: str
    wanted: StructuredOutput
    asked: float
    has_begun: bool = False
    is_given_up: bool = False  # nobody waits for it any more

    @property
    def source(self) -> str:
        """The same for all prompts of a request: the engine knows them as A-0, A-1 and so on."""
        return self.request_id.rpartition("-")[0] or self.request_id


class _Turns:
    """What is to be compiled. The sources take turns, so that nobody waits for all the prompts of somebody else."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[_Compilation]] = OrderedDict()  # the source whose turn it is stands first
        self._num_running: Counter[str] = Counter()
        self._changed = threading.Condition()

    def put(self, compilation: _Compilation) -> None:
        with self._changed:
            self._waiting.setdefault(compilation.source, deque()).append(compilation)
            self._changed.notify()

    def take(self) -> _Compilation:
        """Wait for the next one. `end` must follow."""
        with self._changed:
            while (compilation := self._next()) is None:
                self._changed.wait()
            self._num_running[compilation.source] += 1
            return compilation

    def end(self, compilation: _Compilation) -> None:
        """It runs no longer."""
        with self._changed:
            self._num_running[compilation.source] -= 1
            self._num_running += Counter()  # leaves out those of whom none runs
            self._changed.notify()

    def _next(self) -> _Compilation | None:
        for source, waiting in list(self._waiting.items()):
            while waiting and waiting[0].is_given_up:
                waiting.popleft()
            if waiting and self._num_running[source] >= _MAX_OF_ONE:
                continue
            compilation = waiting.popleft() if waiting else None
            if waiting:
                self._waiting.move_to_end(source)
            else:
                del self._waiting[source]
            if compilation is not None:
                return compilation
        return None


class GrammarCompilation:
    """The grammars of an engine. One thread, that of the step loop, calls its methods."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        on_done: Callable[[], None],
        start_trials: Trials = GrammarTrials,
    ) -> None:
        """Start nothing yet.

        Args:
            load_vocabulary: called in a thread when the first grammar is asked for. Raises TokenizerError.
            vocab_size: of the model.
            on_done: called from a thread whenever `take_finished` has something to give.
            start_trials: called with the vocabulary and the size, after `load_vocabulary`.
        """
        self._load_vocabulary = load_vocabulary
        self._vocab_size = vocab_size
        self._on_done = on_done
        self._start_trials = start_trials
        self._open: dict[str, _Compilation] = {}
        self._turns = _Turns()
        self._done: queue.SimpleQueue[tuple[_Compilation, GrammarState | _Failure]] = queue.SimpleQueue()
        self._start_lock = threading.Lock()  # of these two
        self._compiler: GrammarCompiler | None = None
        self._trials: GrammarTrials | None = None
        self._large = _LargeGrammars()
        self._threads: list[threading.Thread] = []

    def request(self, request_id: str, wanted: StructuredOutput) -> None:
        """Ask for a request's grammar. It comes with `take_finished`."""
        compilation = self._open[request_id] = _Compilation(request_id, wanted, time.monotonic())
        self._turns.put(compilation)
        if len(self._threads) < NUM_AT_ONCE:
            self._start_thread()

    def give_up(self, request_id: str) -> None:
        """Nobody waits for a request's grammar any more; an unknown one is no error."""
        compilation = self._open.pop(request_id, None)
        if compilation is not None:
            compilation.is_given_up = True

    def take_finished(self) -> list[CompiledGrammar]:
        """What has become of grammars since the last call."""
        finished: list[CompiledGrammar] = []
        while True:
            try:
                compilation, outcome = self._done.get_nowait()
            except queue.Empty:
                return finished + self._give_up_late_ones()
            if not compilation.is_given_up:
                del self._open[compilation.request_id]
                finished.append(_finished(compilation, outcome))

    def close(self) -> None:
        """End the process beside, if there is one; what is being compiled comes to nothing."""
        trials = self._trials  # one that is only being started ends with this process
        if trials is not None:
            trials.close()

    def _give_up_late_ones(self) -> list[CompiledGrammar]:
        too_early = time.monotonic() - MAX_SECONDS
        late = [compilation for compilation in self._open.values() if compilation.asked < too_early]
        for compilation in late:
            self.give_up(compilation.request_id)
        return [
            _finished(
                compilation,
                # A grammar that is slow itself is found out on trial, long before.
                _shortage(
                    f"it takes more than {MAX_SECONDS:.0f} s"
                    if compilation.has_begun
                    else f"its turn has not come in {MAX_SECONDS:.0f} s, since too many others are"
                ),
            )
            for compilation in late
        ]

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"grammar-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        usual = threading.stack_size(_STACK_BYTES)
        thread.start()
        threading.stack_size(usual)

    def _work(self) -> None:
        while True:
            compilation = self._turns.take()
            compilation.has_begun = True
            self._done.put((compilation, self._compile(compilation.wanted)))
            self._turns.end(compilation)
            del compilation  # and what it came to, while waiting for the next one
            self._on_done()

    def _compile(self, wanted: StructuredOutput) -> GrammarState | _Failure:
        """The beginning of a grammar, or why there is none."""
        try:
            compiler, trials = self._started()
            outcome = trials.try_out(wanted)
            if outcome.refusal is not None:
                return _Failure(outcome.refusal, outcome.is_shortage)
            lease = self._large.lease(outcome.num_bytes)
            if lease is None:
                return _shortage("it is large, and others that are have taken the memory for such grammars")
            state = compiler.compile(wanted)
            state.lease = lease
            return state
        except GrammarError as error:
            return _Failure(str(error), is_shortage=False)
        except TokenizerError as error:
            logger.error("No grammar can be followed: %s", error)
            return _shortage("the model's vocabulary cannot be read")
        except (TrialLost, OSError) as error:
            logger.error("A grammar could not be tried out: %r", error)
            return _shortage("it could not be tried out")
        except BaseException:  # a panic of the library's is no Exception. No thread ends, and no request waits for ever
            logger.exception("A grammar could not be compiled.")
            return _shortage("compiling it failed")

    def _started(self) -> tuple[GrammarCompiler, GrammarTrials]:
        with self._start_lock:
            if self._compiler is None or self._trials is None:
                vocabulary = self._load_vocabulary()
                # Before the compiler, since the process makes one of its own at the same time.
                self._trials = self._trials or self._start_trials(vocabulary, self._vocab_size)
                self._compiler = GrammarCompiler(vocabulary, self._vocab_size)
            return self._compiler, self._trials


def _shortage(reason: str) -> _Failure:
    return _Failure(reason, is_shortage=True)


def _finished(compilation: _Compilation, outcome: GrammarState | _Failure) -> CompiledGrammar:
    if isinstance(outcome, GrammarState):
        return CompiledGrammar(compilation.request_id, outcome)
    if outcome.is_shortage:  # and no field is at fault
        message = f"The request's grammar cannot be compiled now: {outcome.reason}. Send it again later."
        return CompiledGrammar(compilation.request_id, message=message, is_shortage=True)
    param = compilation.wanted.param
    return CompiledGrammar(
        compilation.request_id, message=f"{param} cannot be followed: {outcome.reason}.", param=param
    )
