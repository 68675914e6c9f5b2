"""The work list of one attention step: which query tile attends over which range of keys, and what is merged after.

Pure host arithmetic in numpy, vectorised: a Python loop over the rows would cost milliseconds a step. Knows no kernel
and no device; both kernels that read the lists name their columns by the constants here.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

ITEM_FIELDS = 8  # row, first query token, num query tokens, position of the first, key begin, key end, slot, unused
MERGE_FIELDS = 4  # query token, first slot, num splits, slots between two splits
DIRECT = -1  # an item's slot when it sees all the keys of its tokens and writes the output itself


@dataclass(frozen=True, slots=True)
class TileSize:
    """The rows of queries (tokens x heads of one group) and the keys that one program holds at a time."""

    query_rows: int
    keys: int


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """The lists of one step, the longest items first. Items with a slot leave a partial result to be merged."""

    decode_items: Int32Array  # [num_decode_items, ITEM_FIELDS], tiles of rows with few query tokens
    prefill_items: Int32Array  # [num_prefill_items, ITEM_FIELDS]
    merges: Int32Array  # [num_merges, MERGE_FIELDS], one per query token whose keys were split
    num_slots: int  # partial results, one per query token and split
    num_planned_tokens: int  # query tokens that some item covers


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Query tiles and the keys that they see; every field is [num_tiles]."""

    row: Int64Array
    first_token: Int64Array
    num_tokens: Int64Array
    position: Int64Array
    key_begin: Int64Array
    key_end: Int64Array


def plan_work(
    query_start_loc: Int32Array,  # [num_rows + 1]
    seq_lens: Int32Array,  # [num_rows], 0 = padding
    *,
    group_size: int,
    num_kv_heads: int,
    sliding_window: int | None,
    decode_tile: TileSize,
    prefill_tile: TileSize,
    target_programs: int,
    min_split_keys: int = 256,
) -> WorkPlan:
    """Cut a mixed batch into items, and split long key ranges while the device would otherwise stand partly idle.

    Args:
        query_start_loc: the query tokens of row i are `query_start_loc[i]:query_start_loc[i + 1]`.
        seq_lens: tokens in the cache per row; the queries are the last of them.
        group_size: query heads per KV head.
        num_kv_heads: programs per item.
        sliding_window: keys before a window are skipped by whole tiles.
        decode_tile: of rows whose query tokens all fit in one such tile.
        prefill_tile: of all other rows.
        target_programs: programs that fill the device; a range is split only up to about as many.
        min_split_keys: no split is shorter, rounded up to whole tiles.
    """
    query_lens = np.diff(query_start_loc).astype(np.int64)
    starts = query_start_loc[:-1].astype(np.int64)
    is_real = (query_lens > 0) & (seq_lens > 0)
    is_decode = query_lens <= decode_tile.query_rows // group_size
    kinds = []
    for tile, rows in ((decode_tile, is_real & is_decode), (prefill_tile, is_real & ~is_decode)):
        row = np.flatnonzero(rows)
        kinds.append((tile, _cut_queries(row, starts[row], query_lens[row], seq_lens[row], tile, group_size)))
    kinds = [(tile, _skip_before_window(tiles, tile, sliding_window)) for tile, tiles in kinds]

    num_keys = np.concatenate([tiles.key_end - tiles.key_begin for _, tiles in kinds])
    unit = max(decode_tile.keys, prefill_tile.keys)
    split_keys = _choose_split(num_keys, unit, num_kv_heads, target_programs, min_split_keys)
    decode_items, decode_merges, num_slots = _split_keys(kinds[0][1], split_keys, 0)
    prefill_items, prefill_merges, num_slots = _split_keys(kinds[1][1], split_keys, num_slots)
    return WorkPlan(
        decode_items=decode_items,
        prefill_items=prefill_items,
        merges=np.concatenate([decode_merges, prefill_merges]),
        num_slots=num_slots,
        num_planned_tokens=int(query_lens[is_real].sum()),
    )


def _cut_queries(
    row: Int64Array,
    first_token: Int64Array,
    query_lens: Int64Array,
    seq_lens: Int32Array,
    tile: TileSize,
    group_size: int,
) -> _Tiles:
    """Tiles of whole tokens, every one with all query heads of a KV head."""
    step = tile.query_rows // group_size
    num_tiles = -(-query_lens // step)
    owner = np.repeat(np.arange(len(row)), num_tiles)
    offset = _counter(num_tiles) * step  # of the tile in its row's query
    num_tokens = np.minimum(step, query_lens[owner] - offset)
    position = seq_lens[owner] - query_lens[owner] + offset
    return _Tiles(
        row=row[owner],
        first_token=first_token[owner] + offset,
        num_tokens=num_tokens,
        position=position,
        key_begin=np.zeros_like(position),
        key_end=position + num_tokens,
    )


def _skip_before_window(tiles: _Tiles, tile: TileSize, sliding_window: int | None) -> _Tiles:
    if sliding_window is None:
        return tiles
    first_key = np.maximum(0, tiles.position + 1 - sliding_window)
    return _Tiles(
        row=tiles.row,
        first_token=tiles.first_token,
        num_tokens=tiles.num_tokens,
        position=tiles.position,
        key_begin=first_key // tile.keys * tile.keys,
        key_end=tiles.key_end,
    )


def _choose_split(num_keys: Int64Array, unit: int, num_kv_heads: int, target_programs: int, min_split_keys: int) -> int:
    """The smallest split, in whole units, whose items keep within the target; the longest range when none does."""
    low = -(-min_split_keys // unit)
    high = max(low, -(-int(num_keys.max(initial=1)) // unit))
    while low < high:
        middle = (low + high) // 2
        if int((-(-num_keys // (middle * unit))).sum()) * num_kv_heads <= target_programs:
            high = middle
        else:
            low = middle + 1
    return low * unit


def _split_keys(tiles: _Tiles, split_keys: int, first_slot: int) -> tuple[Int32Array, Int32Array, int]:
    """Items and merges of the tiles, and the next free slot. A tile's slots run split by split, token by token."""
    num_splits = -(-(tiles.key_end - tiles.key_begin) // split_keys)
    is_split = num_splits > 1
    slots_needed = np.where(is_split, num_splits * tiles.num_tokens, 0)
    base = first_slot + np.cumsum(slots_needed) - slots_needed

    owner = np.repeat(np.arange(len(tiles.row)), num_splits)
    split = _counter(num_splits)
    key_begin = tiles.key_begin[owner] + split * split_keys
    columns = (
        tiles.row[owner],
        tiles.first_token[owner],
        tiles.num_tokens[owner],
        tiles.position[owner],
        key_begin,
        np.minimum(key_begin + split_keys, tiles.key_end[owner]),
        np.where(is_split[owner], base[owner] + split * tiles.num_tokens[owner], DIRECT),
        np.zeros_like(owner),
    )
    items = np.stack(columns, axis=1).astype(np.int32)
    longest_first = np.argsort(items[:, 4] - items[:, 5], kind="stable")

    merged = np.flatnonzero(is_split)
    tile = np.repeat(merged, tiles.num_tokens[merged])
    token = _counter(tiles.num_tokens[merged])
    merges = np.stack(
        (tiles.first_token[tile] + token, base[tile] + token, num_splits[tile], tiles.num_tokens[tile]), axis=1
    ).astype(np.int32)
    return items[longest_first], merges, first_slot + int(slots_needed.sum())


def _counter(counts: Int64Array) -> Int64Array:
    """0 .. counts[0] - 1, 0 .. counts[1] - 1, and so on, end to end."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
