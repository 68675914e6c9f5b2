"""What happened to one request, as plain values that travel to the edge: waits, cache hit, preemptions, sequences.

Frozen. Holds token counts and block ids, never tokens or text; the ledger (scheduler/ledger.py) fills it in.
"""

from dataclasses import dataclass
from typing import Literal

from scheduler.output import DropCause, FinishReason

# Its grammar is being compiled; others go first; no sequence slot; too few KV blocks; the step has no tokens left; it
# ran, and was preempted.
WaitReason = Literal["grammar", "behind_others", "max_num_seqs", "kv_blocks", "token_budget", "preempted"]
# Too few KV blocks; a request of a better priority; one of a tenant that has had less than its share.
PreemptionCause = Literal["kv_blocks", "max_num_seqs", "priority", "fair_share"]
RequestState = Literal["waiting_for_grammar", "waiting", "running", "preempted", "finished", "dropped"]


@dataclass(frozen=True, slots=True)
class Preemption:
    """One time that a sequence lost its blocks."""

    time: float  # seconds since the epoch
    index: int  # of the sequence
    by_request_id: str  # the one that the blocks were for; the same request, if none other could give way
    by_tenant: str
    cause: PreemptionCause
    num_lost_tokens: int  # computed tokens thrown away; 0 if swapped
    is_swapped: bool  # to host memory, not thrown away


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """One of the request's answers."""

    index: int
    state: RequestState
    num_tokens: int  # prompt and generated
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_blocks: int
    block_ids: tuple[int, ...] = ()  # its block table, up to a limit; none once it has ended
    num_host_blocks: int = 0  # that hold what was swapped out
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One request, live or ended. Times in seconds since the epoch, durations in seconds."""

    request_id: str
    tenant: str
    priority: int
    state: RequestState
    arrival_time: float
    queued_time: float  # when the scheduler got it
    report_time: float  # as of when this is true; of an ended one, its end
    num_prompt_tokens: int
    wait_seconds: dict[WaitReason, float]  # the present wait included
    wait_reason: WaitReason | None = None  # of the present wait
    admitted_time: float | None = None  # for the first time
    first_token_time: float | None = None
    ended_time: float | None = None
    num_cached_tokens: int = 0  # of the prompt, at the first admission
    first_difference: int | None = None  # position of the first prompt token that differs from what is cached
    num_generated_tokens: int = 0  # of all sequences
    max_generated_tokens: int = 0  # of the sequence that has most
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    preemptions: tuple[Preemption, ...] = ()  # the first ones, up to a limit
    sequences: tuple[SequenceReport, ...] = ()  # likewise
    drop_cause: DropCause | None = None

    @property
    def queue_seconds(self) -> float:
        """From the scheduler's door to the first admission, or until it ended without one."""
        until = self.report_time if self.admitted_time is None else self.admitted_time
        return max(0.0, until - self.queued_time)

    @property
    def prefill_seconds(self) -> float | None:
        """From the first admission to the first token."""
        if self.admitted_time is None or self.first_token_time is None:
            return None
        return max(0.0, self.first_token_time - self.admitted_time)

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the end."""
        if self.first_token_time is None or self.ended_time is None:
            return None
        return max(0.0, self.ended_time - self.first_token_time)

    @property
    def inference_seconds(self) -> float | None:
        """From the first admission to the end."""
        if self.admitted_time is None or self.ended_time is None:
            return None
        return max(0.0, self.ended_time - self.admitted_time)


@dataclass(frozen=True, slots=True)
class Starvation:
    """A request that has waited too long, and what it waits for."""

    request_id: str
    tenant: str
    priority: int
    reason: WaitReason
    seconds: float  # of the present wait
