"""Paged attention on Triton kernels: plans the step's work list, moves it to the device and launches the kernels.

Knows tile sizes and launch options; the arithmetic is in triton_kernels.py, the cutting up in planner.py.
"""

from dataclasses import dataclass

import torch
import triton

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer, Rotation
from kernels.attention.planner import TileSize, plan_work
from kernels.attention.rotation import rotate_heads
from kernels.attention.triton_kernels import attend_kernel, merge_kernel, write_kv_kernel

LOG2E = 1.4426950408889634
MIN_DOT = 16  # the smallest side of a tile that the matrix units take
HEADS_PER_MERGE = 16


@dataclass(frozen=True, slots=True)
class _HeadShape:
    """What a layer's heads fix about the plan and the kernels."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        return max(MIN_DOT, triton.next_power_of_2(self.head_dim))


@dataclass(frozen=True, slots=True)
class _DevicePlan:
    """A `WorkPlan` with its lists on the device."""

    decode_items: torch.Tensor  # [num_decode_items, ITEM_FIELDS] int32
    prefill_items: torch.Tensor  # [num_prefill_items, ITEM_FIELDS] int32
    merges: torch.Tensor  # [num_merges, MERGE_FIELDS] int32
    num_slots: int
    covers_all_tokens: bool


@dataclass(frozen=True, slots=True)
class _Partials:
    """Softmax states of split key ranges, float32."""

    out: torch.Tensor  # [num_slots, num_q_heads, head_dim]
    max: torch.Tensor  # [num_slots, num_q_heads]
    sum: torch.Tensor  # [num_slots, num_q_heads]


class TritonBackend:
    """One launch per kind of tile (decode, prefill), and one that merges split key ranges where there are any.

    The plan of a batch is kept until another batch comes: all layers of a step share it. So the tensors of
    an `AttentionMetadata` must not be changed in place.
    """

    name = "triton"

    def __init__(self, target_programs: int, min_split_keys: int = 256, *, batch_invariant: bool = False) -> None:
        """Plan for a device that `target_programs` programs fill; no key range is split shorter than the minimum."""
        self._target_programs = target_programs
        self._min_split_keys = min_split_keys
        self._planned: AttentionMetadata | None = None
        self._plans: dict[tuple[_HeadShape, int | None], _DevicePlan] = {}

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> None:
        """Scatter this step's keys and values to `metadata.slot_mapping`; slot -1 writes nothing."""
        num_tokens, num_kv_heads, head_dim = key.shape
        if num_tokens == 0:
            return
        assert key.stride(2) == value.stride(2) == kv_layer.key.stride(3) == kv_layer.value.stride(3) == 1
        write_kv_kernel[(num_tokens,)](
            key,
            value,
            kv_layer.key,
            kv_layer.value,
            metadata.slot_mapping,
            *key.stride()[:2],
            *value.stride()[:2],
            *kv_layer.key.stride()[:3],
            *kv_layer.value.stride()[:3],
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_HEADS=triton.next_power_of_2(num_kv_heads),
            PADDED_DIM=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=kv_layer.block_size,
        )

    def rotate_and_write(
        self,
        heads: torch.Tensor,  # [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], queries, keys, values
        rotation: Rotation,
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim]
        """Norm and rotate query and key heads, write keys and values to the cache, and return the queries."""
        query, key, value = rotate_heads(heads, rotation, kv_layer.key.shape[1])
        self.write_kv(key, value, kv_layer, metadata)
        return query

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim], dtype of query
        """Causal attention of every query token over its own sequence's blocks; padding tokens give zeros."""
        assert query.stride(2) == kv_layer.key.stride(3) == kv_layer.value.stride(3) == metadata.block_tables.stride(1)
        shape = _HeadShape(query.shape[1], kv_layer.key.shape[1], query.shape[2])
        plan = self._plan(metadata, shape, params.sliding_window, query.shape[0])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if not plan.covers_all_tokens:
            out.zero_()
        partials = _Partials(
            out=query.new_empty((plan.num_slots, shape.num_q_heads, shape.head_dim), dtype=torch.float32),
            max=query.new_empty((plan.num_slots, shape.num_q_heads), dtype=torch.float32),
            sum=query.new_empty((plan.num_slots, shape.num_q_heads), dtype=torch.float32),
        )
        for items, tile in ((plan.decode_items, _decode_tile(shape)), (plan.prefill_items, _prefill_tile(shape))):
            if len(items):
                _launch_attend(query, kv_layer, metadata, params, shape, items, tile, partials, out)
        if len(plan.merges):
            _launch_merge(plan.merges, shape, partials, out)
        return out

    def _plan(
        self, metadata: AttentionMetadata, shape: _HeadShape, sliding_window: int | None, num_tokens: int
    ) -> _DevicePlan:
        if self._planned is not metadata:
            self._planned = metadata
            self._plans.clear()
        key = (shape, sliding_window)
        if key not in self._plans:
            work = plan_work(
                metadata.host_query_start_loc,
                metadata.host_seq_lens,
                group_size=shape.group_size,
                num_kv_heads=shape.num_kv_heads,
                sliding_window=sliding_window,
                decode_tile=_decode_tile(shape),
                prefill_tile=_prefill_tile(shape),
                target_programs=self._target_programs,
                min_split_keys=self._min_split_keys,
            )
            device = metadata.block_tables.device
            self._plans[key] = _DevicePlan(
                decode_items=torch.from_numpy(work.decode_items).to(device),
                prefill_items=torch.from_numpy(work.prefill_items).to(device),
                merges=torch.from_numpy(work.merges).to(device),
                num_slots=work.num_slots,
                covers_all_tokens=work.num_planned_tokens == num_tokens,
            )
        return self._plans[key]


def _decode_tile(shape: _HeadShape) -> TileSize:
    """As few query rows as the matrix units take: a decode is bound by the reading of keys and values."""
    return TileSize(max(MIN_DOT, triton.next_power_of_2(shape.group_size)), _keys_per_tile(shape))


def _prefill_tile(shape: _HeadShape) -> TileSize:
    """64 rows, the least that Hopper's warp-group product takes."""
    return TileSize(max(64, triton.next_power_of_2(shape.group_size)), _keys_per_tile(shape))


def _keys_per_tile(shape: _HeadShape) -> int:
    return 64 if shape.padded_dim <= 128 else 32  # a wider tile of 256-wide heads spills registers


def _launch_attend(
    query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    kv_layer: KVLayer,
    metadata: AttentionMetadata,
    params: AttentionParams,
    shape: _HeadShape,
    items: torch.Tensor,  # [num_items, ITEM_FIELDS] int32
    tile: TileSize,
    partials: _Partials,
    out: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
) -> None:
    softcap = params.logit_softcap or 0.0
    is_wide = query.dtype.itemsize > 2  # pipelined float32 tiles would not fit in shared memory
    attend_kernel[(len(items), shape.num_kv_heads)](
        query,
        kv_layer.key,
        kv_layer.value,
        out,
        partials.out,
        partials.max,
        partials.sum,
        metadata.block_tables,
        items,
        params.scale / softcap if softcap else params.scale * LOG2E,
        *query.stride()[:2],
        *out.stride()[:2],
        *kv_layer.key.stride()[:3],
        *kv_layer.value.stride()[:3],
        metadata.block_tables.stride(0),
        NUM_Q_HEADS=shape.num_q_heads,
        GROUP_SIZE=shape.group_size,
        HEAD_DIM=shape.head_dim,
        PADDED_DIM=shape.padded_dim,
        BLOCK_SIZE=kv_layer.block_size,
        QUERY_ROWS=tile.query_rows,
        KEYS=tile.keys,
        SLIDING_WINDOW=params.sliding_window or 0,
        SOFTCAP=softcap,
        num_warps=4 if shape.padded_dim <= 128 else 8,
        num_stages=1 if is_wide else 2,
        enable_fp_fusion=True,  # the default differs between releases of Triton
    )


def _launch_merge(merges: torch.Tensor, shape: _HeadShape, partials: _Partials, out: torch.Tensor) -> None:
    merge_kernel[(len(merges), triton.cdiv(shape.num_q_heads, HEADS_PER_MERGE))](
        partials.out,
        partials.max,
        partials.sum,
        out,
        merges,
        *out.stride()[:2],
        NUM_Q_HEADS=shape.num_q_heads,
        HEAD_DIM=shape.head_dim,
        PADDED_DIM=shape.padded_dim,
        HEADS=HEADS_PER_MERGE,
        enable_fp_fusion=True,
    )
