"""What a launched step brings, on its way to the host: sampled tokens, log-probabilities and embeddings.

Waits for the step's own copies alone, never for what was launched after it. Must not know the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import msgspec
import torch

from kernels.model_ops.ops import ModelOps
from scheduler.output import RowResult, StepResult, TokenLogprobs

_NOTHING = RowResult()


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of some tokens and of the best ones in their places; host tensors, filled in time."""

    token_ids: torch.Tensor  # [num_tokens] int64
    logprobs: torch.Tensor  # [num_tokens] float32
    top_ids: torch.Tensor  # [num_tokens, num_top] int64
    top_logprobs: torch.Tensor  # [num_tokens, num_top] float32

    @classmethod
    def launch(cls, ops: ModelOps, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> "TokenScores":
        """Score tokens under [num_tokens, vocab_size] float32 logits, and begin to copy the scores to the host."""
        return cls(to_host(token_ids), *(to_host(scores) for scores in ops.token_logprobs(logits, token_ids, num_top)))

    def read(self, num_top: list[int]) -> list[TokenLogprobs]:
        """The scores, once they have arrived, with as many best tokens for each as its request asks for."""
        columns = (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs)
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(ids[:k], values[:k], strict=True)))
            for token_id, logprob, ids, values, k in zip(*(c.tolist() for c in columns), num_top, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of rows whose answers are searched for; host tensors, filled in time."""

    places: list[int]  # among the rows that sample
    groups: list[tuple[torch.Tensor, torch.Tensor]]  # ids and log-probabilities, [rows, count] each, of these in turn

    def read(self) -> list[RowResult]:
        """Those of each of `places`, best first, once they have arrived. A token that is forbidden is none."""
        results = []
        for ids, logprobs in self.groups:
            for ranked in map(zip, ids.tolist(), logprobs.tolist()):
                allowed = tuple(pair for pair in ranked if pair[1] > -inf)  # nor is one of a row that has no token left
                results.append(RowResult(candidates=allowed, is_dead_end=not allowed))
        return results


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The token of each row that samples, or what a search chooses among."""

    places: list[int]  # of these rows in the step
    token_ids: torch.Tensor  # [len(places)] int64, on the host
    num_logprobs: dict[int, int]  # index into `places` -> how many best tokens, for the rows that want any scores
    logprobs: TokenScores | None  # one for each of num_logprobs
    is_forbidden: torch.Tensor | None  # [len(places)] bool, on the host: the row had no token left; None = all had
    candidates: Candidates | None = None  # None = no answer is searched for

    def read(self) -> list[RowResult]:
        """One result for each of `places`."""
        token_ids = self.token_ids.tolist()
        if self.logprobs is None:
            results = [RowResult((token_id,)) for token_id in token_ids]
        else:
            scores = dict(zip(self.num_logprobs, self.logprobs.read(list(self.num_logprobs.values())), strict=True))
            results = [
                RowResult((token_id,), (scores[i],) if i in scores else ()) for i, token_id in enumerate(token_ids)
            ]
        if self.is_forbidden is not None:
            for i in self.is_forbidden.nonzero().flatten().tolist():
                results[i] = RowResult(is_dead_end=True)
        if self.candidates is not None:
            for i, result in zip(self.candidates.places, self.candidates.read(), strict=True):
                results[i] = result
        return results


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of one row's prompt tokens, in the pieces that were computed at once."""

    place: int  # of the row in the step
    num_top: int
    pieces: list[TokenScores]

    def read(self) -> tuple[TokenLogprobs, ...]:
        """All of them in order."""
        return tuple(score for piece in self.pieces for score in piece.read([self.num_top] * len(piece.token_ids)))


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The pooled hidden states of the rows whose prompt is complete."""

    places: list[int]  # of these rows in the step
    vectors: torch.Tensor  # [len(places), hidden_size] float32, on the host

    def read(self) -> list[RowResult]:
        """One result for each of `places`."""
        return [RowResult(embedding=vector.astype("<f4").tobytes()) for vector in self.vectors.numpy()]


class PendingStep:
    """A launched step. `result` may be asked for at any time, and launches and other results may come in between."""

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        sampled: SampledTokens | None = None,
        scored: Sequence[PromptScores] = (),
        embeddings: Embeddings | None = None,
    ) -> None:
        """Mark the end of the step on the device: all that it computes and copies has been launched by now."""
        self._num_rows = num_rows
        self._of_rows = [part for part in (sampled, embeddings) if part is not None]  # no row is in both
        self._scored = scored
        self._arrived: torch.cuda.Event | None = None  # None = on a CPU, where launched is done
        if device.type != "cpu":
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(device))

    def result(self) -> StepResult:
        """Wait until the step has run. One result per row, in the order of the scheduler's rows."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = [_NOTHING] * self._num_rows
        for part in self._of_rows:
            for place, row in zip(part.places, part.read(), strict=True):
                rows[place] = row
        for scores in self._scored:
            row = rows[scores.place]
            rows[scores.place] = msgspec.structs.replace(row, prompt_logprobs=scores.read())
        return StepResult(tuple(rows))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy a tensor to the host; it may be read once an event recorded after this call has come to pass."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
