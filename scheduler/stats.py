"""Counters and gauges of the scheduler. Domain types hold no statistics; the edge turns these into metrics."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start. Only the scheduler changes them."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of admitted requests; a forked prompt counts once
    num_generation_tokens: int = 0
    num_recomputed_tokens: int = 0  # computed tokens that preemption threw away


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot between two steps."""

    num_running: int  # sequences that hold blocks
    num_waiting: int  # sequences that wait for admission, preempted ones included
    num_blocks: int
    num_used_blocks: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_recomputed_tokens: int
