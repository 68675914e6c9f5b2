"""Paged attention on Triton kernels: chooses tiles, brings the step's work lists to the device, launches the kernels.

The arithmetic is in triton_kernels.py and triton_write.py, the cutting up in planner.py, the lists in work_lists.py.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import triton

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer, Rotation
from kernels.attention.planner import PlanSettings
from kernels.attention.triton_kernels import attend_kernel, merge_kernel
from kernels.attention.triton_write import launch_rotate_and_write, launch_write_kv
from kernels.attention.tuning import INTERPRETER_ARCH, TileConfig, TileTable
from kernels.attention.work_lists import GraphLists, StepLists, WorkList, WorkLists

LOG2E = 1.4426950408889634
MIN_DOT = 16  # the smallest side of a tile that the matrix units take
HEADS_PER_MERGE = 8
SPLITS_PER_LOAD = 4
SEGMENT_KEYS = 512  # batch-invariant: part of the result, so never tuned
# Batch-invariant: partial results of a captured graph, whose programs run even when there is nothing to do.
MIN_GRAPH_SEGMENTS = 256


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer and its cache fix about plan and kernels. Layers that are alike share their lists."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    tile_dtype: str  # of the cache, by torch's name; float32 when the products are

    @classmethod
    def of(cls, query: torch.Tensor, kv_layer: KVLayer, params: AttentionParams) -> "LayerShape":
        """The shape of a call."""
        dtype = query.dtype if query.dtype == torch.float32 else kv_layer.key.dtype
        return cls(
            num_q_heads=query.shape[1],
            num_kv_heads=kv_layer.key.shape[1],
            head_dim=query.shape[2],
            sliding_window=params.sliding_window,
            tile_dtype=str(dtype).removeprefix("torch."),
        )

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """Tiles have power-of-two sides; the padding is masked, so it costs products but no memory traffic."""
        return max(MIN_DOT, triton.next_power_of_2(self.head_dim))


@dataclass(frozen=True, slots=True)
class Partials:
    """Softmax states of split key ranges, float32."""

    out: torch.Tensor  # [num_slots, num_q_heads, head_dim]
    max: torch.Tensor  # [num_slots, num_q_heads]
    sum: torch.Tensor  # [num_slots, num_q_heads]

    @classmethod
    def allocate(cls, num_slots: int, shape: LayerShape, device: torch.device) -> "Partials":
        """Uninitialised: what a merge reads, an item of the same step has written."""
        size = (num_slots, shape.num_q_heads)
        return cls(
            out=torch.empty((*size, shape.head_dim), dtype=torch.float32, device=device),
            max=torch.empty(size, dtype=torch.float32, device=device),
            sum=torch.empty(size, dtype=torch.float32, device=device),
        )


class TritonBackend:
    """One launch per kind of tile (decode, prefill), and one that merges split key ranges where there are any.

    The plan of a batch is kept until another batch comes: all layers of a step share it. So the tensors of
    an `AttentionMetadata` must not be changed in place.
    """

    name = "triton"

    def __init__(
        self,
        target_programs: int,
        min_split_keys: int = 256,
        *,
        batch_invariant: bool = False,
        tiles: TileTable | None = None,
    ) -> None:
        """Plan for one device.

        Args:
            target_programs: programs that fill it.
            min_split_keys: no key range is split shorter.
            batch_invariant: a token's result is bitwise the same however its batch is made up, chunked or split.
            tiles: None = the table of this package.
        """
        self._target_programs = target_programs
        self._min_split_keys = min_split_keys
        self._batch_invariant = batch_invariant
        self._tiles = tiles or TileTable.load()
        self._settings: dict[LayerShape, PlanSettings] = {}
        self._step_lists = StepLists()
        self._graph_partials: dict[LayerShape, Partials] = {}

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> None:
        """Scatter this step's keys and values to `metadata.slot_mapping`; slot -1 writes nothing."""
        launch_write_kv(key, value, kv_layer, metadata.slot_mapping)

    def rotate_and_write(
        self,
        heads: torch.Tensor,  # [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], queries, keys, values
        rotation: Rotation,
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim]
        """Norm and rotate query and key heads, write keys and values to the cache, and return the queries."""
        return launch_rotate_and_write(heads, rotation, kv_layer, metadata.slot_mapping)

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim], dtype of query
        """Causal attention of every query token over its own sequence's blocks; padding tokens give zeros."""
        shape = LayerShape.of(query, kv_layer, params)
        settings = self.settings(shape, query.device)
        lists = self._step_lists.lists(metadata, settings)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if lists.num_planned_tokens < query.shape[0]:
            out.zero_()
        partials = Partials.allocate(lists.num_slots, shape, query.device)
        launch_attention(query, kv_layer, metadata.block_tables, params, shape, settings, lists, partials, out)
        return out

    def for_graph(self, max_num_rows: int) -> "TritonGraphBackend":
        """The same attention over lists of fixed capacity, for one captured graph of so many decode rows."""
        return TritonGraphBackend(self, max_num_rows)

    def settings(self, shape: LayerShape, device: torch.device) -> PlanSettings:
        """How the steps of a layer are planned."""
        if shape not in self._settings:
            arch = arch_of(device)
            decode, prefill = ("invariant",) * 2 if self._batch_invariant else ("decode", "prefill")
            self._settings[shape] = PlanSettings(
                group_size=shape.group_size,
                num_kv_heads=shape.num_kv_heads,
                sliding_window=shape.sliding_window,
                decode_tile=self._tile(arch, shape, decode),
                prefill_tile=self._tile(arch, shape, prefill),
                target_programs=self._target_programs,
                min_split_keys=self._min_split_keys,
                segment_keys=SEGMENT_KEYS if self._batch_invariant else None,
            )
        return self._settings[shape]

    def graph_partials(self, num_slots: int, shape: LayerShape, device: torch.device) -> Partials:
        """Partial results that all graphs share, since no two run at once; a larger need gets larger ones."""
        partials = self._graph_partials.get(shape)
        if partials is None or partials.out.shape[0] < num_slots:
            partials = Partials.allocate(num_slots, shape, device)
            self._graph_partials[shape] = partials
        return partials

    def _tile(self, arch: str, shape: LayerShape, kind: str) -> TileConfig:
        return self._tiles.lookup(arch, shape.head_dim, shape.group_size, kind, shape.tile_dtype)


class TritonGraphBackend:
    """`TritonBackend` for one captured graph: same kernels, but grid, lists and partial results never move or grow.

    Every kind of layer must have run once before the capture. Between replays `refill` brings other lengths.
    """

    name = "triton"

    def __init__(self, backend: TritonBackend, max_num_rows: int) -> None:
        """For batches of exactly `max_num_rows` rows of few query tokens; a seq_len of 0 is padding."""
        self._backend = backend
        self._max_num_rows = max_num_rows
        self._graph_lists = GraphLists(max_num_rows)
        self._settings: dict[LayerShape, PlanSettings] = {}
        self._partials: dict[LayerShape, Partials] = {}

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> None:
        """Scatter this step's keys and values to `metadata.slot_mapping`; slot -1 writes nothing."""
        self._backend.write_kv(key, value, kv_layer, metadata)

    def rotate_and_write(
        self,
        heads: torch.Tensor,  # [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], queries, keys, values
        rotation: Rotation,
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim]
        """Norm and rotate query and key heads, write keys and values to the cache, and return the queries."""
        return self._backend.rotate_and_write(heads, rotation, kv_layer, metadata)

    def refill(self, query_start_loc: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> None:
        """Plan the next batch into the lists that the graph reads, in the order of the current stream.

        Args:
            query_start_loc: [num_rows + 1].
            seq_lens: [num_rows], 0 = padding.
        """
        self._graph_lists.refill(query_start_loc, seq_lens)

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,  # only its block tables are read, but for the lengths of a first run
        params: AttentionParams,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim], dtype of query
        """Causal attention of the rows last refilled; padding tokens give zeros."""
        shape = LayerShape.of(query, kv_layer, params)
        if shape not in self._settings:
            self._settings[shape] = self._graph_settings(shape, query.device)
        settings = self._settings[shape]
        lists = self._graph_lists.lists(metadata, settings)
        if shape not in self._partials:
            self._partials[shape] = self._backend.graph_partials(lists.num_slots, shape, query.device)
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        partials = self._partials[shape]
        launch_attention(query, kv_layer, metadata.block_tables, params, shape, settings, lists, partials, out)
        return out

    def _graph_settings(self, shape: LayerShape, device: torch.device) -> PlanSettings:
        settings = self._backend.settings(shape, device)
        max_segments = max(MIN_GRAPH_SEGMENTS, 8 * settings.target_items)
        return replace(settings, max_segment_slots=max_segments)


def arch_of(device: torch.device) -> str:
    """The architecture's name in the table of tiles."""
    if device.type != "cuda":
        return INTERPRETER_ARCH
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def launch_attention(
    query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    kv_layer: KVLayer,
    block_tables: torch.Tensor,  # [num_rows, max_num_blocks] int32
    params: AttentionParams,
    shape: LayerShape,
    settings: PlanSettings,
    lists: WorkLists,
    partials: Partials,
    out: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
) -> None:
    """Work off the lists: decode tiles, prefill tiles, merges."""
    for items, tile in ((lists.decode, settings.decode_tile), (lists.prefill, settings.prefill_tile)):
        if items.capacity:
            segment_keys = settings.segment_keys or 0
            _launch_items(query, kv_layer, block_tables, params, shape, items, tile, segment_keys, partials, out)
    if lists.merges.capacity:
        _launch_merges(lists.merges, shape, settings.segment_keys is None, partials, out)


def _launch_items(
    query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    kv_layer: KVLayer,
    block_tables: torch.Tensor,  # [num_rows, max_num_blocks] int32
    params: AttentionParams,
    shape: LayerShape,
    items: WorkList,
    tile: TileConfig,
    segment_keys: int,  # 0 = not batch-invariant
    partials: Partials,
    out: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
) -> None:
    key, value, key_scale, value_scale = kv_layer.key, kv_layer.value, kv_layer.key_scale, kv_layer.value_scale
    assert query.stride(2) == key.stride(3) == value.stride(3) == block_tables.stride(1) == 1
    assert segment_keys % tile.keys == 0
    is_quantised = key_scale is not None
    if key_scale is None or value_scale is None:
        key_scale = value_scale = partials.max.view(-1, 1, 1)  # pointers of the right type that are not followed
    assert key_scale.stride() == value_scale.stride()
    softcap = params.logit_softcap or 0.0
    attend_kernel[(items.capacity * shape.num_kv_heads,)](
        query,
        key,
        value,
        key_scale,
        value_scale,
        out,
        partials.out,
        partials.max,
        partials.sum,
        block_tables,
        items.entries,
        items.count,
        params.scale / softcap if softcap else params.scale * LOG2E,
        *query.stride()[:2],
        *out.stride()[:2],
        *key.stride()[:3],
        *value.stride()[:3],
        *key_scale.stride()[:2],
        block_tables.stride(0),
        NUM_Q_HEADS=shape.num_q_heads,
        GROUP_SIZE=shape.group_size,
        HEAD_DIM=shape.head_dim,
        PADDED_DIM=shape.padded_dim,
        BLOCK_SIZE=kv_layer.block_size,
        QUERY_ROWS=tile.query_rows,
        KEYS=tile.keys,
        SEGMENT_KEYS=segment_keys,
        SLIDING_WINDOW=params.sliding_window or 0,
        SOFTCAP=softcap,
        QUANTISED=is_quantised,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=segment_keys == 0,
    )


def _launch_merges(merges: WorkList, shape: LayerShape, may_fuse: bool, partials: Partials, out: torch.Tensor) -> None:
    merge_kernel[(merges.capacity, triton.cdiv(shape.num_q_heads, HEADS_PER_MERGE))](
        partials.out,
        partials.max,
        partials.sum,
        out,
        merges.entries,
        merges.count,
        *out.stride()[:2],
        NUM_Q_HEADS=shape.num_q_heads,
        HEAD_DIM=shape.head_dim,
        PADDED_DIM=shape.padded_dim,
        HEADS=HEADS_PER_MERGE,
        SPLITS=SPLITS_PER_LOAD,
        enable_fp_fusion=may_fuse,
    )
