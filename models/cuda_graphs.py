"""Decode steps as CUDA graphs: the decoder and its logits, recorded per batch size, replayed with one launch.

Owns the tensors that the graphs read and write. Knows no scheduler and no sampling; what a graph is on the device is
graph_recorder.py's.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention.backend import AttentionBackend
from kernels.attention.metadata import AttentionMetadata
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from models.graph_recorder import CudaGraphRecorder, GraphRecorder, RecordedGraph
from paged_cache.kv_cache import KVCache

MAX_BATCH_SIZE = 512  # beyond it a step takes long enough for the host to keep ahead without a graph


class GraphBackend(AttentionBackend, Protocol):
    """Attention over lists of work that stay where they are, for decode batches of one number of rows."""

    def refill(self, query_start_loc: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> None:
        """Plan the next replay, for [num_rows + 1] and [num_rows]; rows of length 0 are padding."""
        ...


class GraphableBackend(Protocol):
    """An attention backend whose work can be recorded."""

    def for_graph(self, max_num_rows: int) -> GraphBackend:
        """Attention for decode-only batches of exactly `max_num_rows` rows, padding included."""
        ...


@dataclass(frozen=True, slots=True)
class _BatchGraph:
    """The graph of one batch size, and what it reads."""

    batch: ForwardBatch  # views of the static tensors, batch_size rows
    token_inputs: torch.Tensor  # [3 * batch_size] int64: input_ids, positions and slot_mapping of `batch`, end to end
    backend: GraphBackend
    recorded: RecordedGraph


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes worth a graph: up to 64 rows at most 7 of a replay are padding, beyond that a fifth.

    More would waste less, but each takes its time at start and its memory for the launches.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, MAX_BATCH_SIZE + 1, 64)]
    last = min(max_num_seqs, MAX_BATCH_SIZE)
    return [size for size in sizes if size < last] + [last]


class CudaGraphs:
    """Replays decode-only steps; any other step is left to the caller.

    A graph repeats its kernels with the very pointers and numbers it was recorded with, so all that changes between
    steps is copied into tensors that stay: the inputs of each row, and the attention's lists of work. Rows up to the
    graph's batch size are padding: slot -1 writes nothing, and a seq_len of 0 is in no list, so nothing is read.

    The inputs must be on the device already, and are copied from there by three small kernels, in the order of the
    current stream: no copy waits, and none can overtake the replay before it. The results of all batch sizes share
    one pair of tensors, so they are overwritten by the next replay: what a step's results are needed for must have
    been launched by then.
    """

    def __init__(
        self,
        model: Decoder,
        backend: GraphableBackend,
        kv_cache: KVCache,
        batch_sizes: Sequence[int],
        max_num_blocks: int,
        *,
        recorder: GraphRecorder | None = None,
    ) -> None:
        """Allocate the static tensors; `capture` makes the graphs.

        Args:
            model: its weights must be loaded and stay where they are.
            backend: the attention backend that other steps run with.
            kv_cache: of those steps too.
            batch_sizes: numbers of rows to make a graph for; see `graph_batch_sizes`.
            max_num_blocks: of the longest sequence.
            recorder: None = CUDA graphs.
        """
        self._model = model
        self._backend = backend
        self._kv_cache = kv_cache
        self._batch_sizes = sorted(set(batch_sizes))
        self._recorder = CudaGraphRecorder(model.device) if recorder is None else recorder
        self._graphs: dict[int, _BatchGraph] = {}  # by batch size

        max_rows = self._batch_sizes[-1]
        config, device = model.config, model.device
        self._token_inputs = torch.zeros(3 * max_rows, dtype=torch.int64, device=device)
        self._query_start_loc = torch.arange(max_rows + 1, dtype=torch.int32, device=device)  # every row is one token
        self._seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros((max_rows, max_num_blocks), dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, device=device)
        self._hidden = torch.zeros((max_rows, config.hidden_size), dtype=model.dtype, device=device)
        self._logits = torch.zeros((max_rows, config.vocab_size), dtype=torch.float32, device=device)
        # What a padding row is made of.
        self._no_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._no_slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self._no_keys = torch.zeros(max_rows, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """Record a graph for each batch size. The cache is not touched: every row of these runs is padding.

        Args:
            on_progress: called with the number of graphs made so far and in all, at the start and after each.
        """
        total = len(self._batch_sizes)
        on_progress(0, total)
        for num_done, batch_size in enumerate(reversed(self._batch_sizes), start=1):
            self._graphs[batch_size] = self._record(batch_size)
            on_progress(num_done, total)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Replay the smallest graph that holds the batch. Does not wait for the device.

        Returns:
            The normed hidden states, [num_rows, hidden_size], and the logits, [num_rows, vocab_size] float32, both
            valid until the next replay. None where no graph fits: not every row is a single query token whose
            logits are wanted, or there are too many rows.
        """
        num_rows = len(batch.attn.host_seq_lens)
        place = bisect_left(self._batch_sizes, num_rows)
        is_decode = 0 < num_rows == len(batch.input_ids) == len(batch.logits_indices)
        if not is_decode or place == len(self._batch_sizes) or not self._graphs:
            return None
        graph = self._graphs[self._batch_sizes[place]]
        self._fill(graph, batch)
        graph.recorded.replay()
        return self._hidden[:num_rows], self._logits[:num_rows]

    def _record(self, batch_size: int) -> _BatchGraph:
        batch, token_inputs = self._static_batch(batch_size)
        backend = self._backend.for_graph(batch_size)
        backend.refill(batch.attn.host_query_start_loc, batch.attn.host_seq_lens)
        self._fill_tokens(token_inputs, self._no_tokens[:0], self._no_tokens[:0], self._no_slots[:0])
        self._seq_lens.zero_()

        def decode() -> None:
            hidden = self._model(batch, backend, self._kv_cache.layers)
            self._hidden[:batch_size].copy_(hidden)
            self._model.logits(hidden, out=self._logits[:batch_size])

        return _BatchGraph(batch, token_inputs, backend, self._recorder.record(decode))

    def _static_batch(self, batch_size: int) -> tuple[ForwardBatch, torch.Tensor]:
        """The first rows of the static tensors, and the part of the token inputs that they take."""
        token_inputs = self._token_inputs[: 3 * batch_size]
        input_ids, positions, slot_mapping = token_inputs.view(3, batch_size).unbind()
        attn = AttentionMetadata(
            query_start_loc=self._query_start_loc[: batch_size + 1],
            seq_lens=self._seq_lens[:batch_size],
            block_tables=self._block_tables[:batch_size],
            slot_mapping=slot_mapping,
            host_query_start_loc=np.arange(batch_size + 1, dtype=np.int32),
            host_seq_lens=np.zeros(batch_size, dtype=np.int32),
        )
        return ForwardBatch(input_ids, positions, self._rows[:batch_size], attn), token_inputs

    def _fill(self, graph: _BatchGraph, batch: ForwardBatch) -> None:
        """Copy the batch into the static tensors, and pad it."""
        source, static = batch.attn, graph.batch.attn
        num_rows, batch_size = len(source.host_seq_lens), len(static.host_seq_lens)
        self._fill_tokens(graph.token_inputs, batch.input_ids, batch.positions, source.slot_mapping)
        torch.cat((source.seq_lens, self._no_keys[: batch_size - num_rows]), out=static.seq_lens)
        num_blocks = -(-int(source.host_seq_lens.max()) // self._kv_cache.spec.block_size)
        self._block_tables[:num_rows, :num_blocks].copy_(source.block_tables[:, :num_blocks])

        seq_lens = np.zeros(batch_size, dtype=np.int32)
        seq_lens[:num_rows] = source.host_seq_lens
        graph.backend.refill(static.host_query_start_loc, seq_lens)

    def _fill_tokens(
        self,
        token_inputs: torch.Tensor,  # [3 * batch_size] int64
        input_ids: torch.Tensor,  # [num_rows] int64
        positions: torch.Tensor,  # [num_rows] int64
        slot_mapping: torch.Tensor,  # [num_rows] int64
    ) -> None:
        """Three inputs and their padding in one kernel: at one row, launches are most of a step's host time."""
        num_padding = len(token_inputs) // 3 - len(input_ids)
        no_tokens, no_slots = self._no_tokens[:num_padding], self._no_slots[:num_padding]
        torch.cat((input_ids, no_tokens, positions, no_tokens, slot_mapping, no_slots), out=token_inputs)
