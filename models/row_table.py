"""What the runner keeps of each running sequence, in rows that live as long as the sequence runs.

Arrays over all rows, so that a step's inputs are gathered by index, at a cost that does not grow with the context.
Knows the scheduler's messages; must not know the model.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from models.candidates import num_candidates
from models.row_edits import RowEdits
from models.sampler import sequence_keys
from scheduler.output import KnownRow, NewRow
from scheduler.sampling_params import Pooling


class RowTable:
    """Token ids, block tables and sampling parameters of up to `max_num_seqs` sequences, on the host."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """Reserve the rows. The pages of a row are touched only as far as its sequences grow."""
        self.block_size = block_size
        self.edits: dict[int, RowEdits] = {}  # by row, of those that want their logits edited
        self.poolings: dict[int, Pooling] = {}  # by row, of those whose hidden states are wanted, and no tokens
        self.num_candidates: dict[int, int] = {}  # by row, of those whose answers are searched for
        self.num_logprobs: dict[int, int] = {}  # by row, of those that want scores: best tokens to report with each
        self.num_prompt_logprobs: dict[int, int] = {}  # the same of the prompt
        self._eos_token_ids = eos_token_ids
        max_num_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self.block_tables = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        self.num_known_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # those in token_ids: what the scheduler sent
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # and the sampled ones, whose ids the device has
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.random_key = np.zeros(max_num_seqs, dtype=np.uint64)  # of the numbers that tokens are drawn on
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._row_of: dict[int, int] = {}  # by seq_id
        self._free_rows = list(range(max_num_seqs))[::-1]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Give back the rows of sequences that finished or were preempted."""
        for seq_id in seq_ids:
            row = self._row_of.pop(seq_id)
            self._free_rows.append(row)
            self.edits.pop(row, None)
            self.poolings.pop(row, None)
            self.num_candidates.pop(row, None)
            self.num_logprobs.pop(row, None)
            self.num_prompt_logprobs.pop(row, None)

    def take(self, scheduled: NewRow | KnownRow) -> int:
        """Bring a sequence's row up to date with the scheduler's message, and return the row."""
        if isinstance(scheduled, NewRow):
            return self._add(scheduled)
        row = self._row_of[scheduled.seq_id]
        if scheduled.replaced_block is not None:
            position, block_id = scheduled.replaced_block
            self.block_tables[row, position] = block_id
        if scheduled.new_block_ids:
            self._append_blocks(row, scheduled.new_block_ids)
        if scheduled.sampled_token_ids:
            self._append_known_tokens(row, scheduled.sampled_token_ids)
        return row

    def _add(self, new: NewRow) -> int:
        assert new.seq_id not in self._row_of, f"sequence {new.seq_id} arrived twice"
        row = self._row_of[new.seq_id] = self._free_rows.pop()
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_known_tokens[row] = self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        params = new.params
        for name in ("temperature", "top_k", "top_p", "min_p"):
            getattr(self, name)[row] = getattr(params, name)
        [self.random_key[row]] = sequence_keys(np.array([params.seed]), np.array([new.index]))
        # A search takes the log-probabilities of its answers from the candidates.
        if params.logprobs is not None and params.beam_search is None:
            self.num_logprobs[row] = params.logprobs
        # The prompt is the same for every sequence of a request: the first one scores it.
        if params.prompt_logprobs is not None and new.index == 0:
            self.num_prompt_logprobs[row] = params.prompt_logprobs
        self._num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        edits = RowEdits.of(new, self._eos_token_ids)
        if edits is not None:
            self.edits[row] = edits
        if params.pooling is not None:
            self.poolings[row] = params.pooling
        if params.beam_search is not None:
            self.num_candidates[row] = num_candidates(params, self._eos_token_ids)
        return row

    def _append_known_tokens(self, row: int, token_ids: tuple[int, ...]) -> None:
        """Take in tokens that the device has and the host did not."""
        start = self.num_known_tokens[row]
        end = start + len(token_ids)
        assert end <= self.num_tokens[row], f"the scheduler knows {end} tokens of {self.num_tokens[row]}"
        self.token_ids[row, start:end] = token_ids
        self.num_known_tokens[row] = end
        if row in self.edits:
            self.edits[row].extend(token_ids)

    def _append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start = self._num_blocks[row]
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)
