"""The picture of the pool agrees with the manager of the blocks, whatever was allocated, shared and freed."""

import json
import random
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest

from paged_cache.block_table import BlockTable
from paged_cache.manager import BlockManager
from scheduler.pool_report import BlockHolder, PoolReport, report_pool
from scheduler.request import Request, Sequence
from scheduler.sampling_params import SamplingParams
from server.dashboard.pool_image import CACHED, HELD, SHARED, draw_pool
from server.ipc import MessageCodec
from server.messages import EngineMessage, PoolInspection

BLOCK_SIZE = 4


def read(picture: bytes) -> tuple[dict, np.ndarray, list[list[int]]]:
    """As the page reads it: the head, the flags, and the table of each holder."""
    (size,) = struct.unpack_from("<I", picture)
    head = json.loads(picture[4 : 4 + size])
    start = 4 + size
    assert start % 4 == 0
    flags = np.frombuffer(picture, np.uint8, head["num_blocks"], start)
    ids = np.frombuffer(picture, "<u4", offset=start + len(flags) + -len(flags) % 4)
    tables, begin = [], 0
    for holder in head["holders"]:
        tables.append(ids[begin : begin + holder["num_blocks"]].tolist())
        begin += holder["num_blocks"]
    assert begin == len(ids)
    return head, flags, tables


def a_sequence(manager: BlockManager, number: int, token_ids: list[int]) -> Sequence:
    request = Request(f"cmpl-{number}-0", token_ids, SamplingParams(max_tokens=8), 0.0, tenant="t")
    prefix = manager.new_prefix()
    prefix.extend(token_ids)
    return Sequence(number, request, 0, list(token_ids), prefix)


@pytest.mark.parametrize("seed", range(20))
def test_every_block_is_what_the_manager_says(seed):
    chance = random.Random(seed)
    manager = BlockManager(chance.choice((30, 61)), BLOCK_SIZE, enable_prefix_caching=chance.random() < 0.8)
    running: list[Sequence] = []
    for step in range(80):
        if running and chance.random() < 0.4:
            manager.free(running.pop(chance.randrange(len(running))).block_table)
        elif running and chance.random() < 0.3:  # a sibling
            parent = chance.choice(running)
            forked = a_sequence(manager, step, parent.token_ids)
            forked.block_table = manager.fork(parent.block_table, len(parent.token_ids))
            forked.num_computed_tokens = parent.num_computed_tokens
            running.append(forked)
        else:
            length = chance.randint(1, 30)
            sequence = a_sequence(manager, step, [chance.randint(0, 1)] * length)
            cached = manager.find_prefix(sequence.prefix, length - 1)
            if cached.num_unused + manager.num_blocks_for(length) > manager.num_free_blocks:
                continue
            manager.share_prefix(sequence.block_table, cached)
            assert manager.allocate(sequence.block_table, cached.num_tokens, length) is not None
            sequence.num_computed_tokens = length
            manager.register(sequence.block_table, sequence.prefix, length)
            running.append(sequence)
        head, flags, tables = read(draw_pool(report_pool(manager, running), 7, 1.5))
        manager.check_integrity(s.block_table for s in running)
        assert tables == [s.block_table.block_ids for s in running]
        assert np.count_nonzero(flags & HELD) == manager.num_used_blocks
        assert np.count_nonzero(flags & CACHED) == manager.num_cached_blocks
        assert np.count_nonzero(flags & SHARED) == manager.num_shared_blocks
        assert [(h["id"], h["prompt"], h["num_tokens"]) for h in head["holders"]] == [
            (s.request.request_id.removesuffix("-0"), 0, s.num_tokens) for s in running
        ]
    assert (head["number"], head["seconds_until_next"], head["block_size"]) == (7, 1.5, BLOCK_SIZE)


def test_an_empty_pool_and_a_holder_without_a_key():
    manager = BlockManager(5, BLOCK_SIZE)
    _, flags, tables = read(draw_pool(report_pool(manager, []), 1, 1.0))
    assert (flags.tolist(), tables) == ([0] * 5, [])
    holder = BlockHolder("chatcmpl-a-b-12", "", 3, 1, 2, 2, 1)
    head, _, _ = read(draw_pool(PoolReport(4, bytes(2), (holder,), struct.pack("=i", 1)), 1, 1.0))
    assert (head["holders"][0]["id"], head["holders"][0]["prompt"], head["holders"][0]["key"]) == (
        "chatcmpl-a-b",
        12,
        None,
    )


def test_a_million_blocks_take_a_few_bytes_each():
    """Neither the report, nor its message, nor the picture holds an object for each block."""
    num_blocks = 1_000_000
    manager = BlockManager(num_blocks, 16)
    sequence = a_sequence(manager, 1, [1])
    sequence.block_table = BlockTable(list(range(num_blocks)))
    tracemalloc.start()
    try:
        report = report_pool(manager, [sequence])
        _, most_of_report = tracemalloc.get_traced_memory()
        codec = MessageCodec(EngineMessage)
        frame = codec.encode(PoolInspection(1, report, 0.0))
        received = codec.decode(memoryview(frame)[4:])
        picture = draw_pool(report, 1, 1.0)
    finally:
        tracemalloc.stop()
    assert most_of_report < 12 * num_blocks
    assert len(frame) < 5.1 * num_blocks and len(picture) < 5.1 * num_blocks
    assert msgspec.structs.asdict(received)["report"] == report
