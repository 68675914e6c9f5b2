"""From a prepared request to pieces of text: submits it, hands updates to its choices, keeps count and time.

Completions and chat, streamed or whole, all go through here: a whole answer is the fold of the same deltas. However
the caller ends, nothing of the request stays in the engine. Knows no HTTP and no JSON.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec

from scheduler.output import FinishReason, SequenceUpdate
from server.choices import Choice, ChoiceDelta, ChoiceResult, ScoredPrompt
from server.engine_client import EngineClient
from server.engine_errors import RequestRejected
from server.metrics import SequenceRecord, ServerMetrics
from server.off_loop import off_loop_if_large
from server.preparation import PreparedRequest
from server.request_history import RequestTrace
from server.service_terms import Submitter
from server.stop_strings import StopAutomaton
from server.tokenizer import Tokenizer
from server.update_stream import Item, UpdateStream

__all__ = ["ChoiceDelta", "ChoiceResult", "Generation", "SequenceFailed", "TokenCounts"]

_SEQUENCES_A_TURN = 32  # of the event loop; each takes some 30 µs


class SequenceFailed(Exception):
    """The engine could not go on with a sequence."""


class TokenCounts(msgspec.Struct, frozen=True, gc=False):
    """What a request has cost so far."""

    num_prompt_tokens: int  # of all prompts; each counts once, whatever n
    num_completion_tokens: int  # generated so far, those that ended a sequence included
    num_cached_tokens: int = 0  # prompt tokens that were not computed, since their KV blocks were there already
    num_recomputed_tokens: int = 0  # computed again after preemption
    num_truncated_tokens: int = 0  # cut off the prompts, as asked
    prompt_seconds: float = 0.0  # from the request's arrival to its first token
    completion_seconds: float = 0.0  # from then to its last token


@dataclass(slots=True)
class _SequenceProgress:
    """How far one sequence has come."""

    first_token_time: float | None = None
    last_token_time: float = 0.0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    has_ended_there: bool = False  # the engine knows of its end
    has_counted_prompt: bool = False  # the first sequence of a prompt: its tokens are among those that are used


class Generation:
    """One request on its way through the engine."""

    def __init__(
        self,
        request: PreparedRequest,
        trace: RequestTrace,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
        arrival: float,
        submitter: Submitter,
    ) -> None:
        """`trace` learns how its sequences end; `arrival` is of time.perf_counter()."""
        self._request = request
        self._trace = trace
        self._engine = engine
        self._metrics = metrics
        self._usage = metrics.usage.of(trace.key_name)
        self._arrival = arrival
        self._submitter = submitter
        self._tokenizer = tokenizer
        self._engine_ids = list(trace.engine_ids())
        # Choices stand in the order of OpenAI: all answers to the first prompt, then those to the second.
        self._choices: list[Choice] = []  # of the prompts that have been submitted
        self._progress: list[_SequenceProgress] = []
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in request.prompts)
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0
        self._num_recomputed_tokens = 0
        self._arrived: asyncio.Queue[tuple[int, Item | ChoiceDelta]] = asyncio.Queue()  # with the prompt's position
        self._is_waiting = False  # `deltas` is, and everything that came before is with its caller
        self._write: Callable[[ChoiceDelta], bool] | None = None
        self._first_time: float | None = None  # when the first token came, or the end without one
        self._last_time = arrival

    @property
    def counts(self) -> TokenCounts:
        """Tokens and times as of now."""
        first = self._first_time
        return TokenCounts(
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=self._num_completion_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_truncated_tokens=self._request.num_truncated_tokens,
            prompt_seconds=0.0 if first is None else first - self._arrival,
            completion_seconds=0.0 if first is None else self._last_time - first,
        )

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Submit, and yield pieces of the answers as they come. To be called once, and closed.

        Raises:
            InvalidRequest: if there are more prompts than may wait.
            EngineUnavailable: before anything was submitted, or between two prompts.
            RequestRejected: if the scheduler refuses a prompt, or what it asks for cannot be gone on with.
            RequestDropped: if there is no room or no time for it.
            EngineDied: if the engine is lost on the way.
            SequenceFailed: if the engine could not go on with it.
        """
        end: FinishReason = "abort"  # when the caller goes away
        try:
            streams = await self._submit()
            for position, stream in enumerate(streams):
                stream.forward(self._receive, position)
            async with aclosing(self._merged(len(streams))) as deltas:
                async for delta in deltas:
                    yield delta
        except Exception:
            end = "error"
            raise
        finally:
            self._write = None
            self._close(end)

    def divert(self, write: Callable[[ChoiceDelta], bool]) -> None:
        """While the caller of `deltas` waits for the next one, hand it to `write` in the moment in which it comes.

        What `write` does not want, for which it returns false, comes from `deltas`, and so does all that cannot be
        done at once; nothing overtakes anything.
        """
        if len(self._engine_ids) * self._request.num_sequences <= _SEQUENCES_A_TURN:  # else one step may bring too much
            self._write = write

    def _receive(self, position: int, item: Item) -> None:
        """Called with each update as it comes."""
        if (
            self._write is None
            or not self._is_waiting
            or not self._arrived.empty()
            or not isinstance(item, SequenceUpdate)
            or self._choice(position, item).prompt.is_due(item)
        ):
            self._arrived.put_nowait((position, item))
            return
        try:
            delta = self._take(position, item)
            if delta is not None and not self._write(delta):
                self._arrived.put_nowait((position, delta))
        except Exception as error:  # the caller of `deltas` learns it, and not the engine's client
            self._arrived.put_nowait((position, error))
            return
        self._end_if_stopped(position, item)  # whereupon nothing more is expected, which comes after the delta

    async def _merged(self, num_open: int) -> AsyncGenerator[ChoiceDelta, None]:
        """The deltas of so many streams as their updates come. The first error ends all."""
        num_taken = 0
        while num_open:
            self._is_waiting = True
            position, arrived = await self._arrived.get()
            self._is_waiting = False
            if arrived is None:
                num_open -= 1
            elif isinstance(arrived, Exception):
                raise arrived
            elif isinstance(arrived, ChoiceDelta):
                yield arrived
            else:
                choice = self._choice(position, arrived)
                if choice.prompt.is_due(arrived):
                    await choice.prompt.take(arrived)
                delta = self._take(position, arrived)
                self._end_if_stopped(position, arrived)
                if delta is not None:
                    yield delta
            num_taken += 1
            if num_taken % _SEQUENCES_A_TURN == 0:
                await asyncio.sleep(0)  # one step of the engine may bring updates of all of them

    async def result(self) -> list[ChoiceResult]:
        """Wait for all answers; of more than n to a prompt, the n likeliest by token, likeliest first.

        Raises what `deltas` raises.
        """
        results = [ChoiceResult() for _ in range(len(self._request.prompts) * self._request.num_sequences)]

        def add(delta: ChoiceDelta) -> bool:
            results[delta.index].add(delta)
            return True

        self.divert(add)
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                add(delta)
        for choice, result in zip(self._choices, results, strict=True):
            result.prompt_tokens = choice.prompt.tokens
        return [results[index] for index in self._best()]

    def _best(self) -> list[int]:
        """The choices to answer with."""
        n, num_sequences = self._request.n, self._request.num_sequences
        if n == num_sequences:
            return list(range(len(self._choices)))
        best: list[int] = []
        for start in range(0, len(self._choices), num_sequences):
            places = range(start, start + num_sequences)
            best += sorted(places, key=lambda index: -self._choices[index].mean_logprob)[:n]
        return best

    async def _submit(self) -> list[UpdateStream]:
        request = self._request
        self._submitter.refuse_too_many([prompt.token_ids for prompt in request.prompts], "prompt")
        num_chars = sum(map(len, request.stop))
        stops = await off_loop_if_large(num_chars, partial(StopAutomaton, request.stop))
        streams: list[UpdateStream] = []
        arrival_time = time.time() - (time.perf_counter() - self._arrival)
        for engine_id, prompt in zip(self._engine_ids, request.prompts, strict=True):
            if streams:
                await asyncio.sleep(0)  # thousands of prompts in a row would hold up every other request
            if len(streams) % _SEQUENCES_A_TURN == 0 and any(stream.has_failed for stream in streams):
                break  # one is enough to end the request: the engine need not refuse thousands more
            message = self._submitter.message(engine_id, prompt.token_ids, prompt.params, request.terms, arrival_time)
            streams.append(self._engine.submit(message))
            self._metrics.observe_n(request.n)
            scored = ScoredPrompt(prompt, request, self._tokenizer)
            for _ in range(request.num_sequences):
                self._choices.append(Choice(len(self._choices), scored, request, self._tokenizer, stops))
                self._progress.append(_SequenceProgress())
        return streams

    def _choice(self, position: int, update: SequenceUpdate) -> Choice:
        return self._choices[position * self._request.num_sequences + update.index]

    def _take(self, position: int, update: SequenceUpdate) -> ChoiceDelta | None:
        """The delta that an update makes. Its prompt's scores have been taken."""
        index = position * self._request.num_sequences + update.index
        choice = self._choices[index]
        if update.index == 0 and not self._progress[index].has_counted_prompt:
            self._count_prompt(index, update.num_cached_tokens)
        if choice.finish_reason is not None:
            return None  # it met a stop string, and this update was on its way already
        if update.finish_reason == "error":
            raise _as_error(update)
        num_tokens = choice.num_tokens
        delta = choice.take(update)
        self._observe(index, update, choice.num_tokens - num_tokens)
        if choice.finish_reason is not None:
            self._observe_end(index, choice.finish_reason)
        return delta

    def _end_if_stopped(self, position: int, update: SequenceUpdate) -> None:
        """Let the engine know of an answer that ended where it would have gone on."""
        index = position * self._request.num_sequences + update.index
        if self._choices[index].finish_reason is not None and not self._progress[index].has_ended_there:
            self._progress[index].has_ended_there = True
            if update.finish_reason is None:
                self._engine.abort(update.request_id, update.index)

    def _observe(self, index: int, update: SequenceUpdate, num_new_tokens: int) -> None:
        progress = self._progress[index]
        self._num_completion_tokens += num_new_tokens
        self._usage.num_generation_tokens += num_new_tokens
        if update.num_cached_tokens and update.index == 0:  # a prompt is computed once for all of its sequences
            self._num_cached_tokens += max(0, update.num_cached_tokens - progress.num_cached_tokens)
            progress.num_cached_tokens = max(progress.num_cached_tokens, update.num_cached_tokens)
        if update.num_recomputed_tokens:
            self._num_recomputed_tokens += max(0, update.num_recomputed_tokens - progress.num_recomputed_tokens)
            progress.num_recomputed_tokens = max(progress.num_recomputed_tokens, update.num_recomputed_tokens)
        if not update.token_ids and update.finish_reason is None:
            return
        now = self._last_time = time.perf_counter()
        self._first_time = now if self._first_time is None else self._first_time
        if not update.token_ids:
            return
        if progress.first_token_time is None:
            progress.first_token_time = now
            self._metrics.observe_first_token(now - self._arrival)
        else:
            self._metrics.observe_inter_token(now - progress.last_token_time)
        progress.last_token_time = now

    def _count_prompt(self, index: int, num_cached_tokens: int) -> None:
        """The prompt whose first sequence this is has been computed."""
        self._progress[index].has_counted_prompt = True
        self._usage.add_prompt(len(self._choices[index].prompt.prompt.token_ids), num_cached_tokens)

    def _observe_end(self, index: int, reason: FinishReason) -> None:
        choice, progress = self._choices[index], self._progress[index]
        decode_time = None
        if progress.first_token_time is not None and choice.num_tokens > 1:
            decode_time = progress.last_token_time - progress.first_token_time
        self._trace.finish_reasons[reason] += 1
        self._metrics.observe_end(
            SequenceRecord(
                finish_reason=reason,
                num_prompt_tokens=len(choice.prompt.prompt.token_ids),
                num_generation_tokens=choice.num_tokens,
                max_tokens=choice.prompt.prompt.params.max_tokens,
                latency=time.perf_counter() - self._arrival,
                decode_time=decode_time,
            )
        )

    def _close(self, reason: FinishReason, first: int = 0) -> None:
        """Leave nothing in the engine, from one prompt on: thousands of them take several turns of the event loop."""
        num_sequences = self._request.num_sequences
        num_submitted = len(self._choices) // num_sequences
        last = min(num_submitted, first + max(1, _SEQUENCES_A_TURN // num_sequences))
        for engine_id in self._engine_ids[first:last]:
            self._engine.abort(engine_id)
        for index in range(first * num_sequences, last * num_sequences):
            if self._progress[index].first_token_time is not None:  # though the prompt's first sequence had nothing
                of_prompt = index - index % num_sequences
                if not self._progress[of_prompt].has_counted_prompt:
                    self._count_prompt(of_prompt, 0)
            if self._choices[index].finish_reason is None:
                self._observe_end(index, reason)
        if last < num_submitted:
            asyncio.get_running_loop().call_soon(self._close, reason, last)


def _as_error(update: SequenceUpdate) -> Exception:
    """The end of a sequence that could not go on: the caller is told what of his request is at fault, if anything."""
    failure = update.failure
    if failure is not None and failure.param is not None:
        return RequestRejected(failure.message, failure.param)
    reason = "for a reason of its own" if failure is None else failure.message
    return SequenceFailed(f"sequence {update.index} of {update.request_id} failed in the engine: {reason}")
