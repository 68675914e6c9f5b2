"""Who gives way when blocks run out, and who goes first. Pure functions over sequences; they change nothing."""

from collections.abc import Collection

from scheduler.request import Sequence


def choose_victim(running: Collection[Sequence], max_preemptions: int) -> Sequence:
    """The sequence whose preemption throws the least computed work away; the latest arrival among equals.

    A sequence that was preempted `max_preemptions` times is spared while another is left. The one with the most
    work done is therefore never taken for good, and each step brings it closer to its end: no livelock.
    """
    return min(
        running,
        key=lambda s: (s.num_preemptions >= max_preemptions, s.num_computed_tokens, -s.request.arrival_time, -s.seq_id),
    )


def serving_order(sequence: Sequence) -> tuple[int, float, int, int]:
    """Sort key of sequences that wait: by priority, then by arrival; siblings stand together."""
    request = sequence.request
    return request.priority, request.arrival_time, request.sequences[0].seq_id, sequence.index
