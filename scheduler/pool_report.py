"""Who holds which KV blocks, as plain values that travel to the edge: packed, since a pool may have a million of them.

Frozen. Says what is so between two steps; holds no tokens and no text. What is free, used or shared follows from it.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from paged_cache.manager import BlockManager
from scheduler.request import Sequence

_FOUR_BYTES = "i"


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """A sequence that holds blocks."""

    request_id: str
    tenant: str
    index: int  # of the sequence
    num_prompt_tokens: int
    num_tokens: int  # prompt and generated
    num_computed_tokens: int  # the leading ones, which are in its blocks
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Every block of the pool."""

    block_size: int
    is_cached: bytes  # a byte for each block: 1 = it holds a prefix that others may share
    holders: tuple[BlockHolder, ...]
    block_ids: bytes  # the holders' block tables one after the other, four bytes an id, in the machine's order


def report_pool(manager: BlockManager, running: Iterable[Sequence]) -> PoolReport:
    """The pool as of now. `running` are all sequences that hold blocks, by whose number it takes time."""
    block_ids = array(_FOUR_BYTES)
    holders = []
    for sequence in running:
        block_ids.fromlist(sequence.block_table.block_ids)
        holders.append(
            BlockHolder(
                sequence.request.request_id,
                sequence.request.tenant,
                sequence.index,
                sequence.num_prompt_tokens,
                sequence.num_tokens,
                sequence.num_computed_tokens,
                len(sequence.block_table),
            )
        )
    return PoolReport(manager.block_size, manager.cached_blocks(), tuple(holders), block_ids.tobytes())
