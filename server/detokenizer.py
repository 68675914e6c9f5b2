"""Turns the tokens of one sequence into text as they come, so that what is sent never has to be taken back.

Text comes from an incremental UTF-8 decoder over the tokens' bytes and from nowhere else. It is held back only while
its tail is a proper prefix of some stop string or an incomplete character. Knows no requests and no scheduler.
"""

import codecs
from collections.abc import Sequence

import msgspec

from server.stop_strings import StopAutomaton, StopMatcher
from server.tokenizer import Tokenizer


class DetokenizerStep(msgspec.Struct, frozen=True, gc=False):
    """What one push brought."""

    text: str  # may be sent now
    token_offsets: tuple[int, ...]  # for each token taken, where its text begins, in characters of the whole text
    stopped: str | None = None  # the stop string that ended the text


class Detokenizer:
    """The text of one sequence. The texts of all steps and of `finish`, joined, are the text of the whole sequence."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] | StopAutomaton = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Begin a text that ends before the first of the `stop` strings, or after it with `include_stop`.

        First means complete first; of those complete at the same character, the longest. One that is complete within
        the first `min_tokens` tokens does not count. Of the special tokens only `shown_token_ids` are never skipped.
        """
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._hidden_ids = tokenizer.special_token_ids - shown_token_ids if skip_special_tokens else frozenset()
        # Python's decoder replaces what is not UTF-8 as soon as it can be told, and the same in one piece or many.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        stops = stop if isinstance(stop, StopAutomaton) else StopAutomaton(stop)
        self._has_stops = not stops.is_empty
        self._matcher = StopMatcher(stops)
        self._held = ""  # at most one character shorter than the longest stop string
        self._num_chars = 0  # decoded so far, held ones included
        self._num_spared = min_tokens  # tokens to come that end nothing
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one has."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> DetokenizerStep:
        """Take the next tokens. Those after a stop string are not taken: `token_offsets` has one entry per taken token.

        A token's offset counts the characters that were complete before it, so a token that only continues a character
        has the offset of that character. The cost of a token does not grow with the text.
        """
        pieces: list[str] = []
        offsets: list[int] = []
        token_bytes, hidden_ids = self._tokenizer.token_bytes, self._hidden_ids
        for token_id in token_ids:
            if self._stopped is not None:
                break
            offsets.append(self._num_chars)
            if token_id not in hidden_ids:
                pieces.append(self._add(self._decoded(token_bytes(token_id))))
            if self._num_spared > 0:
                self._num_spared -= 1
        return DetokenizerStep("".join(pieces), tuple(offsets), self._stopped)

    def finish(self) -> str:
        """End the sequence: what was held back, with U+FFFD for an incomplete character. Empty after a stop.

        That U+FFFD can itself complete a stop string; `stopped` tells.
        """
        if self._stopped is not None:
            return ""
        text = self._add(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text if self._stopped is not None else text + rest

    def _decoded(self, raw: bytes) -> str:
        if raw.isascii() and not self._decoder.getstate()[0]:  # most tokens, at a third of the time
            return raw.decode("ascii")
        return self._decoder.decode(raw)

    def _find_stop(self, text: str) -> tuple[int, int] | None:
        if self._num_spared > 0:
            self._matcher.pass_over(text)
            return None
        return self._matcher.find_end(text)

    def _add(self, text: str) -> str:
        """Take decoded text; return what is safe to send."""
        if not text:
            return ""
        self._num_chars += len(text)
        if not self._has_stops:
            return text
        found = self._find_stop(text)
        text = self._held + text
        if found is None:
            cut = len(text) - self._matcher.num_pending
        else:
            end, length = len(self._held) + found[0], found[1]
            self._stopped = text[end - length : end]
            cut = end if self._include_stop else end - length
        self._held = text[cut:] if found is None else ""
        return text[:cut]
