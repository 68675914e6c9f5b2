"""The work list of one attention step: which query tile attends over which range of keys, and what is merged after.

Pure host arithmetic in numpy, vectorised: a Python loop over the rows would cost milliseconds a step. Knows no kernel
and no device; both kernels that read the lists name their columns by the constants here.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.attention.tuning import TileConfig

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

ITEM_FIELDS = 8  # row, first query token, num query tokens, position of the first, key begin, key end, slot, unused
MERGE_FIELDS = 4  # query token, first slot, num splits, slots between two splits
DIRECT = -1  # an item's slot when it sees all the keys of its tokens and writes the output itself


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What stays the same from step to step: the heads of a layer, the tiles, and the size of the device."""

    group_size: int  # query heads per KV head
    num_kv_heads: int  # programs per item
    sliding_window: int | None  # keys before a window are skipped by whole tiles
    decode_tile: TileConfig  # of rows whose query tokens all fit in one such tile
    prefill_tile: TileConfig  # of all other rows
    target_programs: int  # programs that fill the device; ranges are split up to about as many
    min_split_keys: int = 256  # no split is shorter, rounded up to whole tiles
    segment_keys: int | None = None  # batch-invariant: a range is split into all its aligned segments, or not at all
    max_segment_slots: int = 4096  # batch-invariant: partial results in each list, at most

    @property
    def target_items(self) -> int:
        """Items that fill the device."""
        return max(1, self.target_programs // self.num_kv_heads)

    def max_decode_items(self, num_rows: int) -> int:
        """Items of a batch of so many decode rows, whatever their lengths.

        Splits of s keys, where s is the smallest with at most `target_items` items in all, or twice the mean length
        if that is less: n rows then have fewer than n + total / (2 * mean) = 1.5 n items. Segments are bounded by
        their slots, one per item at least.
        """
        if self.segment_keys is not None:
            return num_rows + self.max_segment_slots
        return max(num_rows + num_rows // 2, self.target_items)

    def max_decode_slots(self, num_rows: int, max_query_len: int) -> int:
        """Partial results of such a batch, of at most so many query tokens a row."""
        if self.segment_keys is not None:
            return self.max_segment_slots
        return self.max_decode_items(num_rows) * max_query_len


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

    @property
    def num_keys(self) -> Int64Array:
        return self.key_end - self.key_begin


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Where the key ranges of tiles are cut: at `origin + i * step`; every field is [num_tiles]."""

    origin: Int64Array
    step: Int64Array
    num_splits: Int64Array


def plan_work(
    query_start_loc: Int32Array,  # [num_rows + 1], row i has the query tokens query_start_loc[i]:query_start_loc[i + 1]
    seq_lens: Int32Array,  # [num_rows], tokens in the cache, the queries the last of them; 0 = padding
    settings: PlanSettings,
) -> WorkPlan:
    """Cut a mixed batch into items, and split long key ranges where the device would otherwise stand partly idle.

    Each list decides its own splits: however much prefill there is in the batch, few long decodes are split.
    """
    query_lens = np.diff(query_start_loc).astype(np.int64)
    is_real = (query_lens > 0) & (seq_lens > 0)
    is_decode = query_lens <= settings.decode_tile.query_rows // settings.group_size
    lists = []
    num_slots = 0
    for tile, is_listed in (
        (settings.decode_tile, is_real & is_decode),
        (settings.prefill_tile, is_real & ~is_decode),
    ):
        row = np.flatnonzero(is_listed)
        starts, lens = query_start_loc[row].astype(np.int64), seq_lens[row].astype(np.int64)
        tiles = _cut_queries(row, starts, query_lens[row], lens, tile, settings)
        items, merges, num_slots = _list_items(tiles, _cut_keys(tiles, tile, settings), num_slots)
        lists.append((items, merges))
    return WorkPlan(
        decode_items=lists[0][0],
        prefill_items=lists[1][0],
        merges=np.concatenate([lists[0][1], lists[1][1]]),
        num_slots=num_slots,
        num_planned_tokens=int(query_lens[is_real].sum()),
    )


def _cut_queries(
    row: Int64Array,
    first_token: Int64Array,
    query_lens: Int64Array,
    seq_lens: Int64Array,
    tile: TileConfig,
    settings: PlanSettings,
) -> _Tiles:
    """Tiles of whole tokens, every one with all query heads of a KV head."""
    tokens_per_tile = tile.query_rows // settings.group_size
    num_tiles = -(-query_lens // tokens_per_tile)
    owner = np.repeat(np.arange(len(row)), num_tiles)
    offset = _counter(num_tiles) * tokens_per_tile  # of the tile in its row's query
    num_tokens = np.minimum(tokens_per_tile, query_lens[owner] - offset)
    position = seq_lens[owner] - query_lens[owner] + offset
    key_begin = np.zeros_like(position)
    if settings.sliding_window is not None:
        first_key = np.maximum(0, position + 1 - settings.sliding_window)
        key_begin = first_key // tile.keys * tile.keys
    return _Tiles(
        row=row[owner],
        first_token=first_token[owner] + offset,
        num_tokens=num_tokens,
        position=position,
        key_begin=key_begin,
        key_end=position + num_tokens,
    )


def _cut_keys(tiles: _Tiles, tile: TileConfig, settings: PlanSettings) -> _Cuts:
    split_keys = _choose_split(tiles.num_keys, tile.keys, settings)
    if settings.segment_keys is not None:
        return _cut_segments(tiles, split_keys, settings)
    num_splits = -(-tiles.num_keys // split_keys)
    # Even shares instead of full splits and a rest: the longest item is what the device waits for.
    share = -(-tiles.num_keys // num_splits)
    step = -(-share // tile.keys) * tile.keys
    return _Cuts(origin=tiles.key_begin, step=step, num_splits=-(-tiles.num_keys // step))


def _cut_segments(tiles: _Tiles, split_keys: int, settings: PlanSettings) -> _Cuts:
    """Cut the longest ranges at every segment boundary, as many as there are slots for."""
    assert settings.segment_keys is not None
    origin = tiles.key_begin // settings.segment_keys * settings.segment_keys
    num_segments = -(-(tiles.key_end - origin) // settings.segment_keys)
    longest_first = np.argsort(-tiles.num_keys, kind="stable")
    has_slots = np.empty(len(origin), dtype=np.bool_)
    slots_taken = np.cumsum((num_segments * tiles.num_tokens)[longest_first])
    has_slots[longest_first] = slots_taken <= settings.max_segment_slots
    is_split = (tiles.num_keys > split_keys) & has_slots
    return _Cuts(
        origin=origin,
        step=np.where(is_split, settings.segment_keys, tiles.key_end - origin),
        num_splits=np.where(is_split, num_segments, 1),
    )


def _choose_split(num_keys: Int64Array, tile_keys: int, settings: PlanSettings) -> int:
    """Keys of a split, in whole tiles: the least whose items keep within the target, at most twice the mean length.

    The second rule is for a full device: without it one long row would still run when all others have ended.
    """
    if len(num_keys) == 0:
        return tile_keys
    total = int(num_keys.sum())
    low = max(-(-settings.min_split_keys // tile_keys), -(-total // (settings.target_items * tile_keys)))
    high = max(low, -(-int(num_keys.max()) // tile_keys))
    if len(num_keys) >= settings.target_items:
        low = high
    while low < high:
        middle = (low + high) // 2
        if int((-(-num_keys // (middle * tile_keys))).sum()) <= settings.target_items:
            high = middle
        else:
            low = middle + 1
    twice_mean = -(-2 * total // (len(num_keys) * tile_keys))
    return max(min(low, twice_mean), -(-settings.min_split_keys // tile_keys)) * tile_keys


def _list_items(tiles: _Tiles, cuts: _Cuts, first_slot: int) -> tuple[Int32Array, Int32Array, int]:
    """Items and merges of the tiles, and the next free slot. A tile's slots run split by split, token by token."""
    num_splits = cuts.num_splits
    is_split = num_splits > 1
    slots_needed = np.where(is_split, num_splits * tiles.num_tokens, 0)
    base = first_slot + np.cumsum(slots_needed) - slots_needed

    owner = np.repeat(np.arange(len(tiles.row)), num_splits)
    split = _counter(num_splits)
    cut = cuts.origin[owner] + split * cuts.step[owner]
    items = np.zeros((len(owner), ITEM_FIELDS), dtype=np.int32)
    items[:, 0] = tiles.row[owner]
    items[:, 1] = tiles.first_token[owner]
    items[:, 2] = tiles.num_tokens[owner]
    items[:, 3] = tiles.position[owner]
    items[:, 4] = np.maximum(cut, tiles.key_begin[owner])
    items[:, 5] = np.minimum(cut + cuts.step[owner], tiles.key_end[owner])
    items[:, 6] = np.where(is_split[owner], base[owner] + split * tiles.num_tokens[owner], DIRECT)
    longest_first = np.argsort(items[:, 4] - items[:, 5], kind="stable")

    merged = np.flatnonzero(is_split)
    tile = np.repeat(merged, tiles.num_tokens[merged])
    token = _counter(tiles.num_tokens[merged])
    merges = np.empty((len(tile), MERGE_FIELDS), dtype=np.int32)
    merges[:, 0] = tiles.first_token[tile] + token
    merges[:, 1] = base[tile] + token
    merges[:, 2] = num_splits[tile]
    merges[:, 3] = tiles.num_tokens[tile]
    return items[longest_first], merges, first_slot + int(slots_needed.sum())


def _counter(counts: Int64Array) -> Int64Array:
    """0 .. counts[0] - 1, 0 .. counts[1] - 1, and so on, end to end."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
