"""One answer in the making: from the engine's updates of a sequence to pieces of text, with what is reported of tokens.

Detokenises, applies stop strings, puts an echoed prompt in front. Knows no engine client, no clock, no HTTP, no JSON.
"""

from dataclasses import dataclass, field

import msgspec

from scheduler.output import FinishReason, SequenceUpdate, TokenLogprobs
from server.detokenizer import Detokenizer
from server.off_loop import off_loop_if_large
from server.preparation import PreparedPrompt, PreparedRequest
from server.scored_tokens import ScoredToken, TokenScorer, prompt_offsets, score_prompt
from server.stop_strings import StopAutomaton
from server.tokenizer import Tokenizer


class ChoiceDelta(msgspec.Struct, frozen=True):
    """The next piece of one answer. Its tokens are given where logprobs are asked for, never before their text."""

    index: int
    text: str
    tokens: tuple[ScoredToken, ...]
    token_ids: tuple[int, ...]  # generated since the last delta, the one that ended the answer included
    finish_reason: FinishReason | None
    stop_string: str | None = None  # that ended the answer
    stop_token_id: int | None = None  # that ended it, if it is one of the caller's


@dataclass(slots=True)
class ChoiceResult:
    """All deltas of one answer, put together."""

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    prompt_tokens: tuple[ScoredToken, ...] = ()  # where prompt_logprobs are asked for; the same for all of a prompt

    def add(self, delta: ChoiceDelta) -> None:
        """Take the next piece."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_string = delta.stop_string or self.stop_string
        self.stop_token_id = delta.stop_token_id if delta.stop_token_id is not None else self.stop_token_id


class ScoredPrompt:
    """What all answers to one prompt share: its text where it is echoed, and its tokens' scores, put together once."""

    def __init__(self, prompt: PreparedPrompt, request: PreparedRequest, tokenizer: Tokenizer) -> None:
        """For one prompt of a request."""
        self.prompt = prompt
        self.echo = prompt.echo or ""
        self.echoed_tokens: tuple[ScoredToken, ...] = ()  # complete before the first answer begins
        self.tokens: tuple[ScoredToken, ...] = ()  # the same, for prompt_logprobs
        self._echoes_scores = prompt.echo is not None and request.logprobs is not None
        self._request = request
        self._tokenizer = tokenizer
        self._is_due = self._echoes_scores or request.prompt_logprobs is not None
        self._scores: list[TokenLogprobs] = []  # of prompt tokens 1.., as far as they came

    def is_due(self, update: SequenceUpdate) -> bool:
        """The update has to be taken here, before the choice that it belongs to takes it."""
        return (self._is_due or bool(update.prompt_logprobs)) and update.finish_reason != "error"

    async def take(self, update: SequenceUpdate) -> None:
        """Collect the prompt's scores; put its tokens together when an answer begins."""
        self._scores += update.prompt_logprobs
        if self._is_due and (update.token_ids or update.finish_reason is not None):
            self._is_due = False
            request = self._request
            num_likely = 2 + (request.logprobs or 0) + (request.prompt_logprobs or 0)
            await off_loop_if_large(len(self.prompt.token_ids) * num_likely, self._put_together)
            self._scores = []

    def _put_together(self) -> None:
        request, token_ids = self._request, self.prompt.token_ids
        if self._echoes_scores:
            skip = request.skip_special_tokens and not self.prompt.echo_spells_special_tokens
            offsets = prompt_offsets(self._tokenizer, token_ids, self.echo, skip_special_tokens=skip)
            scorer = TokenScorer(self._tokenizer, request.logprobs or 0, names_ids=request.tokens_as_ids)
            self.echoed_tokens = score_prompt(scorer, token_ids, self._scores, offsets)
        if request.prompt_logprobs is not None:
            scorer = TokenScorer(self._tokenizer, request.prompt_logprobs)
            self.tokens = score_prompt(scorer, token_ids, self._scores, (0,) * len(token_ids))


class Choice:
    """One answer in the making."""

    def __init__(
        self,
        index: int,
        prompt: ScoredPrompt,
        request: PreparedRequest,
        tokenizer: Tokenizer,
        stops: StopAutomaton,
    ) -> None:
        """Nothing has come yet. `stops` are the request's."""
        self.prompt = prompt
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._request = request
        self._scorer = TokenScorer(tokenizer, request.logprobs or 0, names_ids=request.tokens_as_ids)
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=stops,
            include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens,
            min_tokens=prompt.prompt.params.min_tokens,
            shown_token_ids=request.answer_form.shown_token_ids,
        )
        self._begun = False
        self._text_length = 0  # code points handed out, the echo included
        self._held_tokens: list[ScoredToken] = []  # whose text the detokenizer still holds back
        self._new_token_ids: list[int] = []  # since the last delta
        self._total_logprob = 0.0

    @property
    def mean_logprob(self) -> float:
        """Of the tokens generated so far, where the engine reports them."""
        return self._total_logprob / max(1, self.num_tokens)

    def take(self, update: SequenceUpdate) -> ChoiceDelta | None:
        """The delta that this update makes, or None if it shows nothing yet."""
        if not update.token_ids and update.finish_reason is None:
            return None
        text = self._take_echo() + self._take_tokens(update)
        if self._detokenizer.stopped is None and update.finish_reason is not None:
            text += self._detokenizer.finish()
        self._text_length += len(text)
        stop_string = self._detokenizer.stopped
        self.finish_reason = update.finish_reason if stop_string is None else "stop"
        tokens = self._release_tokens()
        if not text and not tokens and self.finish_reason is None:
            return None
        token_ids, self._new_token_ids = tuple(self._new_token_ids), []
        is_callers = stop_string is None and update.stop_token_id in self._request.stop_token_ids
        stop_token_id = update.stop_token_id if is_callers else None
        return ChoiceDelta(self._index, text, tokens, token_ids, self.finish_reason, stop_string, stop_token_id)

    def _take_echo(self) -> str:
        """The prompt, in front of the answer's first delta."""
        if self._begun:
            return ""
        self._begun = True
        self._held_tokens += self.prompt.echoed_tokens
        return self.prompt.echo

    def _take_tokens(self, update: SequenceUpdate) -> str:
        visible = update.token_ids
        if update.stop_token_id is not None and not self._request.include_stop:
            visible = visible[:-1]  # it ends the answer and is no part of it
        step = self._detokenizer.push(visible)
        num_taken = len(step.token_offsets)
        taken = update.token_ids if step.stopped is None else update.token_ids[:num_taken]
        self.num_tokens += len(taken)
        self._new_token_ids += taken
        if update.logprobs:
            self._total_logprob += sum(scores.logprob for scores in update.logprobs[: len(taken)])
        if self._request.logprobs is not None:
            assert len(update.logprobs) == len(update.token_ids), "tokens came without their log-probabilities"
            self._held_tokens += [
                self._scorer.score(token_id, len(self.prompt.echo) + offset, scores)
                for token_id, offset, scores in zip(visible, step.token_offsets, update.logprobs, strict=False)
            ]
        return step.text

    def _release_tokens(self) -> tuple[ScoredToken, ...]:
        """The tokens whose text has been handed out. Those of a stop string that is left out never are."""
        if not self._held_tokens:
            return ()
        num_ready = len(self._held_tokens)
        if self.finish_reason is None or self._detokenizer.stopped is not None:
            num_ready = sum(token.offset < self._text_length for token in self._held_tokens)  # offsets only grow
        ready = tuple(self._held_tokens[:num_ready])
        del self._held_tokens[:num_ready]
        return ready
