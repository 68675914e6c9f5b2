"""The scheduler's limits. Read once at start; the edge fills them in from its settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one sequence."""

    max_num_seqs: int  # sequences that hold blocks at once
    max_num_batched_tokens: int  # tokens that one step computes
    max_model_len: int  # prompt and generated tokens of one sequence
    eos_token_ids: frozenset[int] = frozenset()
    long_prefill_token_threshold: int = 0  # most tokens of one sequence in one step while others wait; 0 = no cap
    max_preemptions: int = 3  # after these a sequence is spared while another can give way
    max_queued_requests: int = 0  # requests that wait for their first admission; 0 = no limit
    max_queued_tokens: int = 0  # and their prompts' tokens
    ageing_seconds: float = 30.0  # of waiting lift a request by one of the priorities that wait; 0 = never
    starving_seconds: float = 60.0  # of waiting after which a request is reported with its reason
    recompute_seconds_per_token: float = 0.0  # measured at start; with the next, decides between recompute and swap
    swap_seconds_per_block: float = 0.0  # one way

    def __post_init__(self) -> None:
        """Refuse limits under which no step could make progress.

        Raises:
            ValueError: naming the limit.
        """
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
