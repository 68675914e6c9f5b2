"""From what a generation brings to the bodies of answers. Knows no engine and no HTTP."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.output import FinishReason as EngineFinishReason
from server.choices import ChoiceDelta, ChoiceResult
from server.generation import TokenCounts
from server.preparation import PreparedRequest
from server.protocol.responses import (
    ChatLogprob,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    CompletionTokensDetails,
    FinishReason,
    PromptLogprob,
    PromptTokensDetails,
    Timings,
    Usage,
)
from server.scored_tokens import ScoredToken


def completion_logprobs(tokens: Sequence[ScoredToken]) -> CompletionLogprobs:
    """The four arrays of `/v1/completions`."""
    return CompletionLogprobs(
        tokens=[token.text for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[_top_logprobs(token) for token in tokens],
        text_offset=[token.offset for token in tokens],
        bytes=[tuple(token.raw) for token in tokens],
    )


def prompt_logprobs(tokens: Sequence[ScoredToken]) -> msgspec.Raw:
    """The prompt's tokens in the form of vLLM, encoded: each with the likeliest at its place, by token id."""
    return msgspec.Raw(msgspec.json.encode([_prompt_logprobs_at(token) for token in tokens]))


def _prompt_logprobs_at(token: ScoredToken) -> dict[int, PromptLogprob] | None:
    if token.logprob is None:
        return None
    ranks = {other.token_id: rank for rank, other in enumerate(token.top, 1)}
    at = {token.token_id: PromptLogprob(token.logprob, ranks.get(token.token_id), token.text)}
    for other in token.top:
        at.setdefault(other.token_id, PromptLogprob(other.logprob, ranks[other.token_id], other.text))
    return at


def chat_logprobs(tokens: Sequence[ScoredToken]) -> ChatLogprobs:
    """The list of `/v1/chat/completions`."""
    content = []
    for token in tokens:
        assert token.logprob is not None, "only an echoed prompt has a token without a score"
        top = [ChatLogprob(other.text, other.logprob, tuple(other.raw)) for other in token.top]
        content.append(ChatTokenLogprob(token.text, token.logprob, tuple(token.raw), top))
    return ChatLogprobs(content)


def finish_reason(reason: EngineFinishReason | None) -> FinishReason | None:
    """The reason in the API's words, which know no abort: nobody is left to read of it."""
    if reason is None or reason == "stop" or reason == "length":
        return reason
    raise AssertionError(f"an answer ended with {reason}")


def stop_reason(part: ChoiceDelta | ChoiceResult) -> str | int | None:
    """What of the caller's ended an answer, if anything did: vLLM's field."""
    return part.stop_token_id if part.stop_string is None else part.stop_string


def usage(counts: TokenCounts) -> Usage:
    """The counts of a request."""
    prompt, completion = counts.num_prompt_tokens, counts.num_completion_tokens
    return Usage(
        prompt,
        completion,
        prompt + completion,
        PromptTokensDetails(counts.num_cached_tokens, truncated_tokens=counts.num_truncated_tokens or UNSET),
        CompletionTokensDetails(),
        counts.num_recomputed_tokens or UNSET,
    )


def chunk_usage(request: PreparedRequest, counts: TokenCounts) -> Usage | UnsetType | None:
    """The counts in a chunk that brings a piece of text: null tells that they will come with the last chunk."""
    if request.continuous_usage:
        return usage(counts)
    return None if request.include_usage else UNSET


def timings(request: PreparedRequest, counts: TokenCounts) -> Timings | UnsetType:
    """How long it all took so far, where that is asked for."""
    if not request.include_timings:
        return UNSET
    num_computed = counts.num_prompt_tokens - counts.num_cached_tokens
    prompt_ms, completion_ms = counts.prompt_seconds * 1e3, counts.completion_seconds * 1e3
    num_timed = max(0, counts.num_completion_tokens - 1)  # the first one ends the prompt's time
    return Timings(
        cache_n=counts.num_cached_tokens,
        prompt_n=num_computed,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, num_computed),
        prompt_per_second=_ratio(num_computed * 1e3, prompt_ms),
        predicted_n=counts.num_completion_tokens,
        predicted_ms=completion_ms,
        predicted_per_token_ms=_ratio(completion_ms, num_timed),
        predicted_per_second=_ratio(num_timed * 1e3, completion_ms),
    )


def _ratio(value: float, divisor: float) -> float | None:
    return value / divisor if divisor else None


def _top_logprobs(token: ScoredToken) -> dict[str, float] | None:
    """The likeliest tokens and the one that came, by their text; of two with the same text the likelier."""
    if token.logprob is None:
        return None
    by_text = {token.text: token.logprob}
    for other in token.top:
        by_text.setdefault(other.text, other.logprob)
    return by_text
