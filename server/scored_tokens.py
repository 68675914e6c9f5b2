"""Tokens with their log-probabilities and their place in the text, as answers report them. Knows no request."""

from dataclasses import dataclass

from scheduler.output import TokenLogprobs
from server.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token that could have come."""

    text: str  # for a reader; `bytes:` and hexadecimal where it is no text by itself
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of an answer or of an echoed prompt."""

    text: str
    raw: bytes
    offset: int  # code points of the answer's text that were complete before it
    logprob: float | None  # None for a prompt's first token
    top: tuple[LikelyToken, ...]  # the likeliest at this place, best first


def score_token(tokenizer: Tokenizer, token_id: int, offset: int, scores: TokenLogprobs | None) -> ScoredToken:
    """Put together what is reported of one token."""
    return ScoredToken(
        text=tokenizer.token_text(token_id),
        raw=tokenizer.token_bytes(token_id),
        offset=offset,
        logprob=None if scores is None else max(scores.logprob, _LEAST_LOGPROB),
        top=()
        if scores is None
        else tuple(
            LikelyToken(tokenizer.token_text(i), tokenizer.token_bytes(i), max(logprob, _LEAST_LOGPROB))
            for i, logprob in scores.top
        ),
    )
