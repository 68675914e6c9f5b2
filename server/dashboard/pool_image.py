"""The whole block pool as bytes for a browser: what each block is, and the tables of the sequences that hold them.

Layout, numbers in little-endian order: four bytes with the length of a JSON head, which is padded with spaces to a
multiple of four; a byte for each block, a sum of the flags below, padded with zeros likewise; four bytes for each block
id of the tables, one holder's after the other's in the head's order. Pure functions.
"""

import struct
import sys
from array import array

import msgspec
import numpy as np

from scheduler.pool_report import PoolReport

HELD = 1  # some table holds it
CACHED = 2  # it holds a prefix that others may share
SHARED = 4  # several tables hold it
_ALIGNMENT = 4


class Holder(msgspec.Struct, frozen=True):
    """A sequence that holds blocks."""

    id: str  # of the answer; its requests may have several prompts
    prompt: int
    index: int  # of the sequence
    key: str | None  # the name of the key that it came with
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int


class PoolHead(msgspec.Struct, frozen=True):
    """What the bytes after it are."""

    number: int  # of the picture: two of the same number are the same
    num_blocks: int
    block_size: int
    seconds_until_next: float  # there is no newer one before
    holders: list[Holder]


def block_flags(report: PoolReport) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """What each block is: [num_blocks]."""
    flags = np.frombuffer(report.is_cached, np.uint8) * np.uint8(CACHED)
    num_tables = np.bincount(np.frombuffer(report.block_ids, np.int32), minlength=len(flags))
    flags += (num_tables > 0) * np.uint8(HELD) + (num_tables > 1) * np.uint8(SHARED)
    return flags


def draw_pool(report: PoolReport, number: int, seconds_until_next: float) -> bytes:
    """The picture of a pool. Takes milliseconds for a large one, so it is for a thread."""
    flags = block_flags(report)
    holders = [
        Holder(
            *_answer_of(holder.request_id),
            holder.index,
            holder.tenant or None,
            holder.num_prompt_tokens,
            holder.num_tokens,
            holder.num_computed_tokens,
            holder.num_blocks,
        )
        for holder in report.holders
    ]
    head = msgspec.json.encode(PoolHead(number, len(flags), report.block_size, seconds_until_next, holders))
    head += b" " * (-len(head) % _ALIGNMENT)
    ids = array("i", report.block_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    padding = bytes(-len(flags) % _ALIGNMENT)
    return b"".join((struct.pack("<I", len(head)), head, flags.tobytes(), padding, ids.tobytes()))


def _answer_of(request_id: str) -> tuple[str, int]:
    """The answer, and the place of the prompt in its request."""
    answer_id, _, position = request_id.rpartition("-")
    return answer_id, int(position)
