"""What one running sequence asks of its logits: biases, penalties, and tokens that it may not sample.

Kept on the host, each new token taken in at a cost that does not grow with the context. Knows the scheduler's
messages; must not know the other rows of a step or the device.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.output import NewRow
from scheduler.sampling_params import SamplingParams

_NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, frequency and presence


class Occurrences:
    """The distinct tokens of a sequence that its penalties are for, each in a place of its own."""

    def __init__(self, prompt_token_ids: Sequence[int], generated_token_ids: Sequence[int]) -> None:
        """Count a sequence from its beginning: all at once, for prompts may be long."""
        distinct = dict.fromkeys((*prompt_token_ids, *generated_token_ids))
        self._places = dict(zip(distinct, range(len(distinct)), strict=True))  # by token id
        self._counts = Counter(generated_token_ids)
        self._unsent: set[int] = set()  # tokens whose place or count the device does not have yet
        self._beginning: np.ndarray | None = self._all_changes() if distinct else None  # of the above

    def __len__(self) -> int:
        """Distinct tokens."""
        return len(self._places)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Count tokens that were generated."""
        assert self._beginning is None, "tokens were sampled before the step that edits the first one's logits"
        for token_id in token_ids:
            self._places.setdefault(token_id, len(self._places))
            self._counts[token_id] += 1
            self._unsent.add(token_id)

    def take_beginning(self) -> np.ndarray | None:
        """Place, token id and count of what a sequence began with, [3, num_tokens] int64, the first time; then None."""
        beginning, self._beginning = self._beginning, None
        return beginning

    def take_changes(self) -> list[tuple[int, int, int]]:
        """The same of the tokens that were generated since the last call."""
        changes = [(self._places[token_id], token_id, self._counts[token_id]) for token_id in self._unsent]
        self._unsent.clear()
        return changes

    def _all_changes(self) -> np.ndarray:
        changes = np.zeros((3, len(self._places)), np.int64)
        changes[0] = np.arange(len(self._places))
        changes[1] = np.fromiter(self._places, np.int64, len(self._places))
        changes[2, [self._places[token_id] for token_id in self._counts]] = list(self._counts.values())
        return changes


class BadWords:
    """Token sequences that may not be completed, found by the tokens that they begin with."""

    def __init__(self, words: Collection[tuple[int, ...]]) -> None:
        """Take sequences of at least one token."""
        self._completions: dict[tuple[int, ...], list[int]] = {}
        for *beginning, last in words:
            self._completions.setdefault(tuple(beginning), []).append(last)
        self._lengths = sorted({len(beginning) for beginning in self._completions})  # of the beginnings

    def forbidden(self, generated_token_ids: np.ndarray) -> list[int]:
        """The tokens that would complete a sequence, after these. The prompt begins none, as in vLLM."""
        num_generated = len(generated_token_ids)
        found = []
        for length in self._lengths:
            if length > num_generated:
                break
            tail = tuple(generated_token_ids[num_generated - length :].tolist())
            found += self._completions.get(tail, [])
        return found


@dataclass(slots=True)
class RowEdits:
    """The edits of one sequence's logits."""

    bias_token_ids: np.ndarray  # [num_biases] int64
    biases: np.ndarray  # [num_biases] float32
    allowed_token_ids: tuple[int, ...]  # () = all
    penalties: tuple[float, float, float]  # repetition, frequency and presence
    occurrences: Occurrences  # empty where nothing is penalised
    bad_words: BadWords | None
    min_tokens: int
    end_token_ids: list[int]  # not to be sampled before `min_tokens`
    allowed_mask: np.ndarray | None = field(default=None)  # made of `allowed_token_ids` when first asked for

    @classmethod
    def of(cls, new: NewRow, eos_token_ids: Sequence[int]) -> "RowEdits | None":
        """What a sequence asks for; None where it takes its logits as they are."""
        params = new.params
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        is_penalised = penalties != _NO_PENALTIES
        if not (is_penalised or params.min_tokens or params.logit_bias or params.allowed_token_ids or params.bad_words):
            return None
        biases = dict(params.logit_bias)
        return cls(
            bias_token_ids=np.fromiter(biases.keys(), np.int64, len(biases)),
            biases=np.fromiter(biases.values(), np.float32, len(biases)),
            allowed_token_ids=params.allowed_token_ids,
            penalties=penalties,
            occurrences=_occurrences(new),
            bad_words=BadWords(params.bad_words) if params.bad_words else None,
            min_tokens=params.min_tokens,
            end_token_ids=_end_token_ids(params, eos_token_ids),
        )

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that were generated."""
        if self.penalties != _NO_PENALTIES:
            self.occurrences.extend(token_ids)

    @property
    def may_forbid(self) -> bool:
        """Whether tokens of some step may be forbidden."""
        return self.bad_words is not None or self.min_tokens > 0

    def forbidden(self, generated_token_ids: np.ndarray, num_generated: int) -> list[int]:
        """Tokens that may not come next.

        Args:
            generated_token_ids: those known on the host; all of them where anything looks at them.
            num_generated: their number, those that only the device knows included.
        """
        found = self.end_token_ids if num_generated < self.min_tokens else []
        return found if self.bad_words is None else found + self.bad_words.forbidden(generated_token_ids)

    def mask(self, num_bytes: int) -> np.ndarray | None:
        """Bits of the tokens that are allowed at all, lowest first, [num_bytes] uint8; None = all are."""
        if self.allowed_mask is None and self.allowed_token_ids:
            is_allowed = np.zeros(num_bytes * 8, dtype=np.uint8)
            is_allowed[list(self.allowed_token_ids)] = 1
            self.allowed_mask = np.packbits(is_allowed, bitorder="little")
        return self.allowed_mask


def _occurrences(new: NewRow) -> Occurrences:
    """Of the tokens that its penalties look at: repetition at all, frequency and presence at the generated ones."""
    params = new.params
    looks_at_prompt = params.repetition_penalty != 1.0
    looks_at_generated = looks_at_prompt or params.frequency_penalty or params.presence_penalty
    prompt, generated = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
    return Occurrences(prompt if looks_at_prompt else (), generated if looks_at_generated else ())


def _end_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    return [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
