"""What the runner keeps of each running sequence, in rows that live as long as the sequence runs.

Arrays over all rows, so that a step's inputs are gathered by index, at a cost that does not grow with the context.
Knows the scheduler's messages; must not know the model.
"""

from collections.abc import Iterable

import numpy as np

from scheduler.output import KnownRow, NewRow
from scheduler.sampling_params import SamplingParams


class RowTable:
    """Token ids, block tables and sampling parameters of up to `max_num_seqs` sequences, on the host."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        """Reserve the rows. The pages of a row are touched only as far as its sequences grow."""
        max_num_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self.block_tables = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.index = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.params: dict[int, SamplingParams] = {}  # by row
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._row_of: dict[int, int] = {}  # by seq_id
        self._free_rows = list(range(max_num_seqs))[::-1]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Give back the rows of sequences that finished or were preempted."""
        for seq_id in seq_ids:
            row = self._row_of.pop(seq_id)
            del self.params[row]
            self._free_rows.append(row)

    def take(self, scheduled: NewRow | KnownRow) -> int:
        """Bring a sequence's row up to date with the scheduler's message, and return the row."""
        if isinstance(scheduled, NewRow):
            return self._add(scheduled)
        row = self._row_of[scheduled.seq_id]
        if scheduled.replaced_block is not None:
            position, block_id = scheduled.replaced_block
            self.block_tables[row, position] = block_id
        self._append_blocks(row, scheduled.new_block_ids)
        return row

    def append_token(self, row: int, token_id: int) -> None:
        """Add a sampled token. One sampled at the very end of the window is the last: nothing will read it."""
        num_tokens = self.num_tokens[row]
        if num_tokens < self.token_ids.shape[1]:
            self.token_ids[row, num_tokens] = token_id
        self.num_tokens[row] = num_tokens + 1

    def _add(self, new: NewRow) -> int:
        assert new.seq_id not in self._row_of, f"sequence {new.seq_id} arrived twice"
        row = self._row_of[new.seq_id] = self._free_rows.pop()
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.index[row] = new.index
        self.params[row] = new.params
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            getattr(self, name)[row] = getattr(new.params, name)
        self._num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        return row

    def _append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start = self._num_blocks[row]
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)
