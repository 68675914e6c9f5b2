"""The work lists on the device: of one step, exactly as long as needed, or of fixed capacity for a captured graph.

All lists of a step and a kind of layer lie in one buffer, so that one copy brings them. Knows the planner; launches
nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.metadata import AttentionMetadata
from kernels.attention.planner import ITEM_FIELDS, MERGE_FIELDS, Int32Array, PlanSettings, WorkPlan, plan_work

COUNT_FIELDS = 4  # 16 bytes for each count, of which the first 4 are used: all lists start where wide loads may
NUM_LISTS = 3


@dataclass(frozen=True, slots=True)
class WorkList:
    """One list that one launch works off; the grid has its capacity, and programs past `count` end at once."""

    entries: torch.Tensor  # [capacity, ITEM_FIELDS or MERGE_FIELDS] int32
    count: torch.Tensor  # [1] int32

    @property
    def capacity(self) -> int:
        """Entries that the list has room for."""
        return self.entries.shape[0]


@dataclass(frozen=True, slots=True)
class WorkLists:
    """The lists of one kind of layer."""

    decode: WorkList
    prefill: WorkList
    merges: WorkList
    num_slots: int  # partial results to make room for
    num_planned_tokens: int  # query tokens that get a result; the rest of the output is padding


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many entries the lists of a buffer have room for."""

    decode_items: int
    prefill_items: int
    merges: int
    num_slots: int

    @property
    def num_fields(self) -> int:
        """int32 numbers in the buffer."""
        num_items = self.decode_items + self.prefill_items
        return NUM_LISTS * COUNT_FIELDS + num_items * ITEM_FIELDS + self.merges * MERGE_FIELDS


class StepLists:
    """Lists planned anew for every step and kept until another batch comes: all layers of a step share them."""

    def __init__(self) -> None:
        """Without a batch yet."""
        self._metadata: AttentionMetadata | None = None
        self._lists: dict[PlanSettings, WorkLists] = {}

    def lists(self, metadata: AttentionMetadata, settings: PlanSettings) -> WorkLists:
        """The lists of a batch, on the device of its block tables; the batch is told by its identity."""
        if self._metadata is not metadata:
            self._metadata = metadata
            self._lists.clear()
        if settings not in self._lists:
            plan = plan_work(metadata.host_query_start_loc, metadata.host_seq_lens, settings)
            capacity = Capacity(len(plan.decode_items), len(plan.prefill_items), len(plan.merges), plan.num_slots)
            device = metadata.block_tables.device
            buffer = _host_buffer(plan, capacity, device).to(device, non_blocking=True)
            self._lists[settings] = _views(buffer, capacity, plan.num_planned_tokens)
        return self._lists[settings]


class GraphLists:
    """Lists of fixed capacity and address for batches of exactly `max_num_rows` decode rows.

    A layer's lists come to be at its first call, which must be before the capture; `refill` puts other lengths there.
    No later row may have more query tokens than the longest of that first batch, nor all of them more in sum.
    """

    def __init__(self, max_num_rows: int) -> None:
        """For so many rows; rows with a seq_len of 0 are padding."""
        self._max_num_rows = max_num_rows
        self._query_start_loc: Int32Array | None = None
        self._seq_lens: Int32Array | None = None
        self._lists: dict[PlanSettings, WorkLists] = {}
        self._buffers: dict[PlanSettings, torch.Tensor] = {}
        self._capacities: dict[PlanSettings, Capacity] = {}

    def lists(self, metadata: AttentionMetadata, settings: PlanSettings) -> WorkLists:
        """The lists of one kind of layer; filled from the last `refill`, or from the metadata if there was none."""
        if settings not in self._lists:
            device = metadata.block_tables.device
            assert not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()), (
                "a layer must run once before the graph is captured: its lists would come from the capture's own memory"
            )
            if self._query_start_loc is None:
                self.refill(metadata.host_query_start_loc, metadata.host_seq_lens)
            assert self._query_start_loc is not None
            self._allocate(settings, self._query_start_loc, device)
            self._fill(settings)
        return self._lists[settings]

    def refill(self, query_start_loc: Int32Array, seq_lens: Int32Array) -> None:
        """Plan a batch and bring its lists to the device, in the order of the current stream.

        Args:
            query_start_loc: [num_rows + 1].
            seq_lens: [num_rows], 0 = padding.
        """
        assert len(seq_lens) == self._max_num_rows, f"{len(seq_lens)} rows in a graph of {self._max_num_rows}"
        self._query_start_loc, self._seq_lens = query_start_loc.copy(), seq_lens.copy()
        for settings in self._lists:
            self._fill(settings)

    def _allocate(self, settings: PlanSettings, query_start_loc: Int32Array, device: torch.device) -> None:
        max_query_len = int(np.diff(query_start_loc).max(initial=1))
        capacity = Capacity(
            decode_items=settings.max_decode_items(self._max_num_rows),
            prefill_items=0,
            merges=int(query_start_loc[-1]),
            num_slots=settings.max_decode_slots(self._max_num_rows, max_query_len),
        )
        buffer = torch.zeros(capacity.num_fields, dtype=torch.int32, device=device)
        self._capacities[settings] = capacity
        self._buffers[settings] = buffer
        self._lists[settings] = _views(buffer, capacity, num_planned_tokens=0)

    def _fill(self, settings: PlanSettings) -> None:
        assert self._query_start_loc is not None and self._seq_lens is not None
        plan = plan_work(self._query_start_loc, self._seq_lens, settings)
        buffer = self._buffers[settings]
        buffer.copy_(_host_buffer(plan, self._capacities[settings], buffer.device), non_blocking=True)


def _host_buffer(plan: WorkPlan, capacity: Capacity, device: torch.device) -> torch.Tensor:  # [num_fields] int32
    """The lists as they will lie on the device; entries past a list's count are left as they are.

    A new buffer each time: torch's allocator of pinned memory hands it out again only once the copy has ended.
    """
    lists = (plan.decode_items, plan.prefill_items, plan.merges)
    rooms = (capacity.decode_items, capacity.prefill_items, capacity.merges)
    for name, entries, room in zip(("decode items", "prefill items", "merges"), lists, rooms, strict=True):
        assert len(entries) <= room, f"{len(entries)} {name} in a list of fixed capacity {room}"
    assert plan.num_slots <= capacity.num_slots, f"{plan.num_slots} partial results, room for {capacity.num_slots}"
    buffer = torch.empty(capacity.num_fields, dtype=torch.int32, pin_memory=device.type == "cuda")
    array = buffer.numpy()
    array[: NUM_LISTS * COUNT_FIELDS : COUNT_FIELDS] = [len(entries) for entries in lists]
    begin = NUM_LISTS * COUNT_FIELDS
    for entries, room in zip(lists, rooms, strict=True):
        array[begin : begin + entries.size] = entries.ravel()
        begin += room * entries.shape[1]
    return buffer


def _views(buffer: torch.Tensor, capacity: Capacity, num_planned_tokens: int) -> WorkLists:
    counts = buffer[: NUM_LISTS * COUNT_FIELDS].view(NUM_LISTS, COUNT_FIELDS)
    rooms = (
        (capacity.decode_items, ITEM_FIELDS),
        (capacity.prefill_items, ITEM_FIELDS),
        (capacity.merges, MERGE_FIELDS),
    )
    views = []
    begin = NUM_LISTS * COUNT_FIELDS
    for i, (room, num_fields) in enumerate(rooms):
        entries = buffer[begin : begin + room * num_fields].view(room, num_fields)
        views.append(WorkList(entries, counts[i, :1]))
        begin += room * num_fields
    decode, prefill, merges = views
    return WorkLists(decode, prefill, merges, capacity.num_slots, num_planned_tokens)
