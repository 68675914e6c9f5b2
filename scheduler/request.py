"""A request and its sequences: what the scheduler schedules. No clocks, no text, no torch."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from paged_cache.block_table import BlockTable
from paged_cache.prefix_cache import TokenPrefix
from scheduler.grammar import GrammarState
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from scheduler.beam_search import BeamGroup


class SequenceStatus(Enum):
    """Where a sequence stands. Only the scheduler changes it."""

    WAITING_FOR_GRAMMAR = auto()  # of its request, which is being compiled; holds no blocks
    WAITING = auto()  # not admitted yet; holds no blocks
    RUNNING = auto()  # holds blocks
    PREEMPTED = auto()  # has no blocks of the device any more, or none yet, and goes before requests that did not begin
    FINISHED = auto()  # holds no blocks, stands in no queue


@dataclass(eq=False, slots=True)
class Sequence:
    """One of a request's n answers. `num_computed_tokens` chases `num_tokens`; there are no other phases."""

    seq_id: int
    request: "Request"
    index: int
    token_ids: list[int]  # the prompt, then what was generated
    prefix: TokenPrefix  # the keys under which its full blocks are cached
    priority: int = 0  # its request's, or a better one that waiting had lifted it to when it was admitted
    num_computed_tokens: int = 0  # leading tokens whose keys and values launched steps put in the cache
    num_pending_tokens: int = 0  # sampled by launched steps, their ids not known yet
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: BlockTable = field(default_factory=BlockTable)
    num_preemptions: int = 0
    num_lost_tokens: int = 0  # leading tokens that were computed once before: what is computed of them now is again
    num_swapped_tokens: int = 0  # leading tokens whose keys and values are in host blocks
    num_cached_tokens: int = 0  # of the prompt: those whose blocks were there when it was first admitted
    num_recomputed_tokens: int = 0  # tokens that were computed again after preemptions
    num_sent_tokens: int = 0  # leading tokens whose ids the runner has got; kept where sampling looks back
    grammar: GrammarState | None = None  # how far its tokens are along it

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and generated."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled; pending ones count, the last one it may have does not.

        The first of several sequences stops one token short of the prompt until its siblings have been forked,
        so that each of them computes the last prompt token itself and samples like any other sequence. A sequence
        whose sampling depends on the tokens before has nothing to compute until those are known.
        """
        request = self.request
        if self.num_pending_tokens and request.looks_back:
            return 0
        if request.awaits_fork:
            return self.num_prompt_tokens - 1 - self.num_computed_tokens
        num_known = len(self.token_ids) + self.num_pending_tokens
        return min(num_known, request.max_computed_tokens) - self.num_computed_tokens

    @property
    def has_work(self) -> bool:
        """Not of a beam that waits for the candidates of others: wherever it stands, it has nothing to compute."""
        beams = self.request.beams
        return beams is None or not beams.has_candidates_of(self)

    @property
    def idle_mates(self) -> "list[Sequence]":
        """The running beams of its search, if all of them wait for some that do not run. It may be one of either."""
        request = self.request
        if request.beams is None:
            return []
        running = [s for s in request.sequences if s.status is SequenceStatus.RUNNING]
        return [] if any(s.has_work for s in running) else running

    @property
    def has_computed_all(self) -> bool:
        """Every token is computed, pending ones included: the step that computes the last of them samples the next."""
        return self.num_computed_tokens == len(self.token_ids) + self.num_pending_tokens


@dataclass(eq=False, slots=True)
class Request:
    """A validated, tokenised request. Everything but `sequences` and its bookkeeping stays as it came."""

    request_id: str
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    arrival_time: float  # seconds since the epoch
    priority: int = 0  # a lower one is served first
    tenant: str = ""  # whose share of the engine it takes, and whose cached blocks it may share
    cache_salt: str = ""  # narrows with whom it shares cached blocks
    reuses_cache: bool = True  # may begin with cached blocks
    queue_deadline: float | None = None  # seconds since the epoch by which it must have been admitted
    deadline: float | None = None  # by which its answer must be complete
    sequences: list[Sequence] = field(default_factory=list)
    aborted_indices: set[int] = field(default_factory=set)  # of sequences that were aborted before they existed
    num_scored_tokens: int = 0  # prompt tokens whose log-probabilities have been reported
    has_token: bool = False  # some sequence has generated one
    num_created_sequences: int = 0  # dead beams included
    first_seq_id: int = -1  # of the first of them
    beams: "BeamGroup | None" = None  # where it is searched for and not sampled, once the prompt is computed
    max_computed_tokens: int = field(init=False)  # of one sequence: nothing reads the last token that it may have
    looks_back: bool = field(init=False)  # see SamplingParams
    may_skip_prompt: bool = field(init=False)  # nothing but the last of its tokens needs to be computed for its results

    def __post_init__(self) -> None:
        """Derive what every step asks for."""
        params = self.params
        self.looks_back = params.looks_back
        self.may_skip_prompt = params.prompt_logprobs is None and params.pooling != "mean"
        self.max_computed_tokens = len(self.prompt_token_ids) + max(0, self.params.max_tokens - 1)

    @property
    def awaits_fork(self) -> bool:
        """Its prompt is still being computed by the first sequence, for all n of them."""
        return self.num_created_sequences < self.params.n and self.params.beam_search is None

    @property
    def is_finished(self) -> bool:
        """Every sequence has ended."""
        return not self.awaits_fork and all(s.status is SequenceStatus.FINISHED for s in self.sequences)
