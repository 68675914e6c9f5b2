"""Tokens with their log-probabilities and their place in the text, as answers report them. Knows no request.

There may be millions of them. They are no part of any cycle, so the garbage collector need not visit them (`gc=False`):
a full collection would hold up every thread for a third of a second.
"""

from collections.abc import Sequence

import msgspec

from scheduler.output import TokenLogprobs
from server.detokenizer import Detokenizer
from server.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


class LikelyToken(msgspec.Struct, frozen=True, gc=False):
    """A token that could have come."""

    text: str  # for a reader; `bytes:` and hexadecimal where it is no text by itself
    raw: bytes
    logprob: float


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
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


def score_prompt(
    tokenizer: Tokenizer, token_ids: Sequence[int], scores: Sequence[TokenLogprobs], text: str
) -> tuple[ScoredToken, ...]:
    """The tokens of an echoed prompt, whose text is `text`. `scores` begin with the second: none is before the first.

    Takes microseconds for each token and each of the likeliest beside it: a second for a long prompt.
    """
    assert len(scores) == len(token_ids) - 1, "an answer began before its prompt was scored"
    detokenizer = Detokenizer(tokenizer)
    step = detokenizer.push(token_ids)
    # A tokenizer may write a space before the first word: its text is then longer than the caller's.
    surplus = max(0, len(step.text + detokenizer.finish()) - len(text))
    return tuple(
        score_token(tokenizer, token_id, min(max(0, offset - surplus), len(text)), score)
        for token_id, offset, score in zip(token_ids, step.token_offsets, [None, *scores], strict=True)
    )
