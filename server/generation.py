"""From a prepared request to pieces of text: submits it, detokenises its updates, applies stop strings, keeps count.

Completions and chat, streamed or whole, all go through here: a whole answer is the fold of the same deltas. However
the caller ends, nothing of the request stays in the engine. Knows no HTTP and no JSON.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from scheduler.output import FinishReason, SequenceUpdate, TokenLogprobs
from server.detokenizer import Detokenizer
from server.engine_client import EngineClient, UpdateStream
from server.messages import Submit
from server.metrics import SequenceRecord, ServerMetrics
from server.off_loop import off_loop_if_large
from server.preparation import PreparedPrompt, PreparedRequest
from server.scored_tokens import ScoredToken, score_prompt, score_token
from server.tokenizer import Tokenizer


class SequenceFailed(Exception):
    """The engine could not go on with a sequence."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The next piece of one answer. Its tokens are given where logprobs are asked for, never before their text."""

    index: int
    text: str
    tokens: tuple[ScoredToken, ...]
    token_ids: tuple[int, ...]  # generated since the last delta, the one that ended the answer included
    finish_reason: FinishReason | None
    stop_string: str | None = None  # that ended the answer


@dataclass(slots=True)
class ChoiceResult:
    """All deltas of one answer, put together."""

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What a request has cost so far."""

    num_prompt_tokens: int  # of all prompts; each counts once, whatever n
    num_completion_tokens: int  # generated so far, those that ended a sequence included
    num_cached_tokens: int = 0  # prompt tokens that were not computed, since their KV blocks were there already
    num_recomputed_tokens: int = 0  # computed again after preemption


class Generation:
    """One request on its way through the engine."""

    def __init__(
        self,
        request: PreparedRequest,
        request_id: str,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
        arrival: float,
    ) -> None:
        """`request_id` must be unique in the engine; `arrival` is of time.perf_counter()."""
        self._request = request
        self._engine = engine
        self._metrics = metrics
        self._arrival = arrival
        self._engine_ids = [f"{request_id}-{position}" for position in range(len(request.prompts))]
        echoes = [_Echo(prompt, request.logprobs, tokenizer) for prompt in request.prompts]
        # Choices stand in the order of OpenAI: all answers to the first prompt, then those to the second.
        self._choices = [
            _Choice(index, echo, request, tokenizer, arrival)
            for index, echo in enumerate(echo for echo in echoes for _ in range(request.n))
        ]
        self._num_submitted = 0

    @property
    def counts(self) -> TokenCounts:
        """Tokens as of now."""
        return TokenCounts(
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in self._request.prompts),
            num_completion_tokens=sum(choice.num_tokens for choice in self._choices),
        )

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Submit, and yield pieces of the answers as they come. To be called once, and closed.

        Raises:
            EngineUnavailable: before anything was submitted, or between two prompts.
            RequestRejected: if the scheduler refuses a prompt.
            EngineDied: if the engine is lost on the way.
            SequenceFailed: if the engine could not go on with it.
        """
        end: FinishReason = "abort"  # when the caller goes away
        try:
            async with aclosing(_merge(self._submit())) as updates:
                async for position, update in updates:
                    delta = await self._take(position, update)
                    if delta is not None:
                        yield delta
        except Exception:
            end = "error"
            raise
        finally:
            self._close(end)

    async def result(self) -> list[ChoiceResult]:
        """Wait for all answers. Raises what `deltas` raises."""
        results = [ChoiceResult() for _ in self._choices]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                result = results[delta.index]
                result.text += delta.text
                result.tokens += delta.tokens
                result.token_ids += delta.token_ids
                result.finish_reason = delta.finish_reason or result.finish_reason
                result.stop_string = delta.stop_string or result.stop_string
        return results

    def _submit(self) -> list[UpdateStream]:
        streams = []
        arrival_time = time.time() - (time.perf_counter() - self._arrival)
        for engine_id, prompt in zip(self._engine_ids, self._request.prompts, strict=True):
            streams.append(self._engine.submit(Submit(engine_id, prompt.token_ids, prompt.params, arrival_time)))
            self._num_submitted += 1
            self._metrics.observe_n(self._request.n)
        return streams

    async def _take(self, position: int, update: SequenceUpdate) -> ChoiceDelta | None:
        choice = self._choices[position * self._request.n + update.index]
        if choice.finish_reason is not None:
            return None  # it met a stop string, and this update was on its way already
        if update.finish_reason == "error":
            raise SequenceFailed(f"sequence {update.index} of {update.request_id} failed in the engine")
        await choice.echo.take(update)
        self._observe_tokens(choice, update)
        delta = choice.take(update)
        if choice.finish_reason is not None:
            if update.finish_reason is None:
                self._engine.abort(update.request_id, update.index)
            self._observe_end(choice, choice.finish_reason)
        return delta

    def _observe_tokens(self, choice: "_Choice", update: SequenceUpdate) -> None:
        if not update.token_ids:
            return
        now = time.perf_counter()
        if choice.first_token_time is None:
            choice.first_token_time = now
            self._metrics.observe_first_token(now - self._arrival)
        else:
            self._metrics.observe_inter_token(now - choice.last_token_time)
        choice.last_token_time = now

    def _observe_end(self, choice: "_Choice", reason: FinishReason) -> None:
        decode_time = None
        if choice.first_token_time is not None and choice.num_tokens > 1:
            decode_time = choice.last_token_time - choice.first_token_time
        self._metrics.observe_end(
            SequenceRecord(
                finish_reason=reason,
                num_prompt_tokens=len(choice.echo.prompt.token_ids),
                num_generation_tokens=choice.num_tokens,
                max_tokens=choice.echo.prompt.params.max_tokens,
                latency=time.perf_counter() - self._arrival,
                decode_time=decode_time,
            )
        )

    def _close(self, reason: FinishReason) -> None:
        for engine_id in self._engine_ids[: self._num_submitted]:
            self._engine.abort(engine_id)
        for choice in self._choices[: self._num_submitted * self._request.n]:
            if choice.finish_reason is None:
                self._observe_end(choice, reason)


class _Echo:
    """What stands before all answers to one prompt: nothing, or the prompt itself, put together once for all."""

    def __init__(self, prompt: PreparedPrompt, logprobs: int | None, tokenizer: Tokenizer) -> None:
        self.prompt = prompt
        self.text = prompt.echo or ""
        self.tokens: tuple[ScoredToken, ...] = ()  # complete before the first answer begins
        self._is_due = prompt.echo is not None and logprobs is not None
        self._num_logprobs = len(prompt.token_ids) * (1 + (logprobs or 0))
        self._scores: list[TokenLogprobs] = []  # of prompt tokens 1.., as far as they came
        self._tokenizer = tokenizer

    async def take(self, update: SequenceUpdate) -> None:
        """Collect the prompt's scores; put its tokens together when an answer begins."""
        self._scores += update.prompt_logprobs
        if self._is_due and (update.token_ids or update.finish_reason is not None):
            self._is_due = False
            self.tokens = await off_loop_if_large(self._num_logprobs, self._score)
            self._scores = []

    def _score(self) -> tuple[ScoredToken, ...]:
        return score_prompt(self._tokenizer, self.prompt.token_ids, self._scores, self.text)


class _Choice:
    """One answer in the making."""

    def __init__(self, index: int, echo: _Echo, request: PreparedRequest, tokenizer: Tokenizer, arrival: float) -> None:
        self.echo = echo
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.first_token_time: float | None = None
        self.last_token_time = arrival
        self._index = index
        self._scored = request.logprobs is not None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, stop=request.stop)
        self._begun = False
        self._text_length = 0  # code points handed out, the echo included
        self._held_tokens: list[ScoredToken] = []  # whose text the detokenizer still holds back
        self._new_token_ids: list[int] = []  # since the last delta

    def take(self, update: SequenceUpdate) -> ChoiceDelta | None:
        """The delta that this update makes, or None if it shows nothing yet."""
        if not update.token_ids and update.finish_reason is None:
            return None
        text = self._take_echo() + self._take_tokens(update)
        if self._detokenizer.stopped is None and update.finish_reason is not None:
            text += self._detokenizer.finish()
        self._text_length += len(text)
        self.finish_reason = update.finish_reason if self._detokenizer.stopped is None else "stop"
        tokens = self._release_tokens()
        if not text and not tokens and self.finish_reason is None:
            return None
        token_ids, self._new_token_ids = tuple(self._new_token_ids), []
        return ChoiceDelta(self._index, text, tokens, token_ids, self.finish_reason, self._detokenizer.stopped)

    def _take_echo(self) -> str:
        """The prompt, in front of the answer's first delta."""
        if self._begun:
            return ""
        self._begun = True
        self._held_tokens += self.echo.tokens
        return self.echo.text

    def _take_tokens(self, update: SequenceUpdate) -> str:
        visible = update.token_ids
        if update.stop_token_id is not None:
            visible = visible[:-1]  # it ends the answer and is no part of it
        step = self._detokenizer.push(visible)
        num_taken = len(step.token_offsets)
        taken = update.token_ids if step.stopped is None else update.token_ids[:num_taken]
        self.num_tokens += len(taken)
        self._new_token_ids += taken
        if self._scored:
            assert len(update.logprobs) == len(update.token_ids), "tokens came without their log-probabilities"
            self._held_tokens += [
                score_token(self._tokenizer, token_id, len(self.echo.text) + offset, scores)
                for token_id, offset, scores in zip(visible, step.token_offsets, update.logprobs, strict=False)
            ]
        return step.text

    def _release_tokens(self) -> tuple[ScoredToken, ...]:
        """The tokens whose text has been handed out. Those of a stop string never are."""
        num_ready = len(self._held_tokens)
        if self.finish_reason is None or self._detokenizer.stopped is not None:
            num_ready = sum(token.offset < self._text_length for token in self._held_tokens)  # offsets only grow
        ready = tuple(self._held_tokens[:num_ready])
        del self._held_tokens[:num_ready]
        return ready


async def _merge(streams: Sequence[UpdateStream]) -> AsyncGenerator[tuple[int, SequenceUpdate], None]:
    """The updates of several streams as they come, each with its stream's position. The first error ends all."""
    queue: asyncio.Queue[tuple[int, SequenceUpdate] | Exception | None] = asyncio.Queue()

    async def pump(position: int, stream: UpdateStream) -> None:
        try:
            async for update in stream:
                queue.put_nowait((position, update))
        except Exception as error:
            queue.put_nowait(error)
        queue.put_nowait(None)

    if len(streams) == 1:
        async for update in streams[0]:
            yield 0, update
        return
    pumps = [asyncio.create_task(pump(position, stream)) for position, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            match await queue.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case item:
                    yield item
    finally:
        for task in pumps:
            task.cancel()
