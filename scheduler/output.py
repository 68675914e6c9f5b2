"""The messages between the scheduler, the model runner and the edge. Frozen, of plain values, no torch.

A SchedulerOutput is a diff: the runner keeps what it was told of a sequence until it is named finished or
preempted. A resumed sequence arrives as a new one. What each row of each step makes anew is a msgspec struct: frozen
dataclasses take seven to nine times as long to make, and were half of the scheduler's time.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from scheduler.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
# The queue has no room for it; it waited longer than it may; its answer would come too late.
DropCause = Literal["queue_full", "queue_timeout", "deadline"]


@dataclass(frozen=True, slots=True)
class NewRow:
    """First step of a sequence since it was admitted, forked or resumed: the runner learns all of it."""

    seq_id: int  # unique in this engine
    index: int  # which of the request's n sequences
    token_ids: tuple[int, ...]  # every known token: the prompt and, after preemption, what was generated
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    num_new_tokens: int  # tokens to compute in this step

    @property
    def end(self) -> int:
        """Computed tokens after this step."""
        return self.num_computed_tokens + self.num_new_tokens


class KnownRow(msgspec.Struct, frozen=True):
    """A later step of a sequence that the runner holds."""

    seq_id: int
    new_block_ids: tuple[int, ...]  # to be appended to its block table
    replaced_block: tuple[int, int] | None  # (position in the block table, new block id) after copy-on-write
    num_computed_tokens: int
    num_new_tokens: int
    sampled_token_ids: tuple[int, ...] = ()  # since the last row, for a sequence whose sampling looks back

    @property
    def end(self) -> int:
        """Computed tokens after this step."""
        return self.num_computed_tokens + self.num_new_tokens


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """Which tokens a row of the step may sample."""

    place: int  # of the row in the step
    bitmask: bytes  # little-endian, bit i of the whole for token i; ceil(vocab_size / 32) words of 32 bits


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a whole block before this step writes (copy-on-write)."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. Rows stand in the order of the batch: decodes (one new token) first."""

    rows: tuple[NewRow | KnownRow, ...]
    finished_seq_ids: tuple[int, ...] = ()  # finished, aborted or preempted since the last step: forget them
    block_copies: tuple[BlockCopy, ...] = ()
    swapped_out: tuple[BlockCopy, ...] = ()  # device block -> host block, before anything else of this step
    swapped_in: tuple[BlockCopy, ...] = ()  # host block -> device block, before this step's rows write
    grammar_masks: tuple[GrammarMask, ...] = ()  # of rows that sample under a grammar

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(row.num_new_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability (natural logarithm, of the unscaled softmax) of one token, and the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


class RowResult(msgspec.Struct, frozen=True):
    """What one row of the step brought. No token is sampled while a row's known tokens are not all computed."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt tokens this step has scored, in order
    embedding: bytes = b""  # pooled hidden states, [hidden_size] float32 little-endian, once the prompt is computed
    candidates: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first; only for beam search
    is_dead_end: bool = False  # a token was to be sampled, and the request's constraints together allow none


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per row of the SchedulerOutput, in its order."""

    rows: tuple[RowResult, ...]


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """Why a sequence could not go on."""

    message: str  # a sentence for the caller; for the log, where the request is not at fault
    param: str | None = None  # the field at fault; None = none of them


@dataclass(frozen=True, slots=True)
class Dropped:
    """A request that the scheduler ended for want of room or time; no update of it follows."""

    request_id: str
    cause: DropCause
    message: str  # a sentence for the caller


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What the edge streams of one sequence after one step."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()  # new tokens, the one that ended the sequence included
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for prompt tokens 1.., only from sequence 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it; its text is not part of the answer
    embedding: bytes = b""  # as in RowResult
    num_cached_tokens: int = 0  # so far: prompt tokens that were not computed, since their blocks were there
    num_recomputed_tokens: int = 0  # so far: tokens that were computed again after preemption
    failure: SequenceFailure | None = None  # with the finish reason "error"
