"""Counters and gauges of the scheduler. Domain types hold no statistics; the edge turns these into metrics."""

from dataclasses import dataclass

import msgspec


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start. Only the scheduler changes them."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of admitted requests; a forked prompt counts once
    num_generation_tokens: int = 0
    num_recomputed_tokens: int = 0  # that preemption threw away and that were computed again
    num_recomputed_prompt_tokens: int = 0  # of them, those of prompts
    num_prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache, once a request
    num_prefix_hits: int = 0  # of them, those that were found
    num_copied_blocks: int = 0  # shared ones, before one of their holders wrote to them
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_dropped_queue_full: int = 0  # requests; see DropCause
    num_dropped_queue_timeout: int = 0
    num_dropped_deadline: int = 0


class SchedulerStats(msgspec.Struct, frozen=True):
    """A snapshot between two steps; a busy engine takes one in several."""

    num_running: int  # sequences that hold blocks
    num_waiting: int  # sequences that wait for admission, preempted ones included
    num_blocks: int
    num_used_blocks: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_recomputed_tokens: int
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_dropped_queue_full: int = 0
    num_dropped_queue_timeout: int = 0
    num_dropped_deadline: int = 0
    num_deferred: int = 0  # of those that wait, the ones whose grammar is being compiled
    num_queued_tokens: int = 0  # of the prompts that wait for their first admission
    num_starving: int = 0  # requests that have waited longer than SchedulerConfig.starving_seconds
    num_cached_blocks: int = 0  # that hold a prefix which others may share, used ones included
    num_evicted_blocks: int = 0  # since the start: cached blocks that were handed out for something else
    num_saved_blocks: int = 0  # more than the used ones would be needed if no block were shared
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_evictable_blocks: int = 0  # that hold a prefix and that no sequence holds: free, but last to be handed out
    num_recomputed_prompt_tokens: int = 0
    num_shared_blocks: int = 0  # that more than one sequence holds
    num_copied_blocks: int = 0
    num_empty_slots: int = 0  # of used blocks: they hold no token
