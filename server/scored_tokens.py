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

    token_id: int
    text: str  # for a reader; `bytes:` and hexadecimal where it is no text by itself
    raw: bytes
    logprob: float


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """One token of an answer or of a prompt."""

    token_id: int
    text: str
    raw: bytes
    offset: int  # code points of the answer's text that were complete before it
    logprob: float | None  # None for a prompt's first token
    top: tuple[LikelyToken, ...]  # the likeliest at this place, best first


class TokenScorer:
    """Puts together what one request wants to know of tokens: of the likeliest ones too, `num_top` at each place."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, names_ids: bool = False) -> None:
        """With `names_ids` a token's text is `token_id:` and its id, which tells all tokens apart."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._names_ids = names_ids

    def score(self, token_id: int, offset: int, scores: TokenLogprobs | None) -> ScoredToken:
        """One token; `scores` are None where nothing comes before it."""
        text, raw = self._spell(token_id)
        if scores is None:
            return ScoredToken(token_id, text, raw, offset, None, ())
        top = tuple(
            LikelyToken(other, *self._spell(other), max(logprob, _LEAST_LOGPROB))
            for other, logprob in scores.top[: self._num_top]
        )
        return ScoredToken(token_id, text, raw, offset, max(scores.logprob, _LEAST_LOGPROB), top)

    def _spell(self, token_id: int) -> tuple[str, bytes]:
        raw = self._tokenizer.token_bytes(token_id)
        return f"token_id:{token_id}" if self._names_ids else self._tokenizer.token_text(token_id), raw


def score_prompt(
    scorer: TokenScorer, token_ids: Sequence[int], scores: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> tuple[ScoredToken, ...]:
    """The tokens of a prompt, which begin at `offsets`. `scores` begin with the second: none is before the first.

    Takes microseconds for each token and each of the likeliest beside it: a second for a long prompt.
    """
    assert len(scores) == len(token_ids) - 1, "an answer began before its prompt was scored"
    return tuple(
        scorer.score(token_id, offset, score)
        for token_id, offset, score in zip(token_ids, offsets, [None, *scores], strict=True)
    )


def prompt_offsets(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str, *, skip_special_tokens: bool
) -> tuple[int, ...]:
    """Where the tokens of an echoed prompt begin in its text, which may lack what the tokenizer put around it."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    step = detokenizer.push(token_ids)
    surplus = _surplus(step.text + detokenizer.finish(), text)
    return tuple(min(max(0, offset - surplus), len(text)) for offset in step.token_offsets)


def _surplus(spelled: str, text: str) -> int:
    """Characters that a tokenizer's spelling of `text` has before it: a space, a special token."""
    if spelled.endswith(text):
        return len(spelled) - len(text)
    begin = spelled.find(text)  # where it puts something behind the text as well
    return begin if begin >= 0 else max(0, len(spelled) - len(text))
