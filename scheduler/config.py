"""The scheduler's limits. Read once at start; the edge fills them in from its settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one sequence."""

    max_num_seqs: int  # sequences that hold blocks at once
    max_num_batched_tokens: int  # tokens that one step computes
    max_model_len: int  # prompt and generated tokens of one sequence
    eos_token_ids: frozenset[int] = frozenset()
    long_prefill_token_threshold: int = 0  # most tokens of one sequence in one step; 0 = no cap
    max_preemptions: int = 3  # after these a sequence is spared while another can give way

    def __post_init__(self) -> None:
        """Refuse limits under which no step could make progress.

        Raises:
            ValueError: naming the limit.
        """
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
