"""From what a generation brings to the bodies of answers. Knows no engine and no HTTP."""

from collections.abc import Sequence

from scheduler.output import FinishReason as EngineFinishReason
from server.generation import TokenCounts
from server.protocol.responses import (
    ChatLogprob,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    FinishReason,
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
    )


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


def usage(counts: TokenCounts) -> Usage:
    """The counts of a request."""
    prompt, completion = counts.num_prompt_tokens, counts.num_completion_tokens
    return Usage(prompt, completion, prompt + completion)


def _top_logprobs(token: ScoredToken) -> dict[str, float] | None:
    """The likeliest tokens and the one that came, by their text; of two with the same text the likelier."""
    if token.logprob is None:
        return None
    by_text = {token.text: token.logprob}
    for other in token.top:
        by_text.setdefault(other.text, other.logprob)
    return by_text
