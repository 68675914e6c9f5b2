"""One step on the device: a SchedulerOutput in, a StepResult out.

Rows -> block copies -> ForwardBatch -> decoder -> logits -> sampler. Holds the model, the cache and the rows of the
sequences that run; takes no decisions: what runs, and in which blocks, is the scheduler's.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.backend import AttentionBackend
from kernels.attention.metadata import AttentionMetadata
from kernels.sampling.sampling_batch import SamplingBatch
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from models.row_table import RowTable
from models.sampler import token_logprobs, uniform_numbers
from paged_cache.kv_cache import KVCache
from scheduler.output import RowResult, SchedulerOutput, StepResult, TokenLogprobs

# Prompt tokens are scored this many at a time: the logits of a long prompt at once would not fit in memory.
_SCORED_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class _Step:
    """Where each row of the step stands. Host arrays, one entry per row of the batch."""

    rows: np.ndarray  # [num_rows] int64, rows of the row table
    num_computed: np.ndarray  # [num_rows] int64, before this step
    num_new: np.ndarray  # [num_rows] int64
    query_start_loc: np.ndarray  # [num_rows + 1] int32
    samples: np.ndarray  # [num_rows] bool: all known tokens are computed after this step


class ModelRunner:
    """Executes steps of one model over one KV cache."""

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Keep up to `max_num_seqs` sequences of up to `max_model_len` tokens."""
        self._model = model
        self._backend = backend
        self._kv_cache = kv_cache
        self._block_size = kv_cache.spec.block_size
        self._table = RowTable(max_num_seqs, max_model_len, self._block_size)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute every row's new tokens, and sample where a row's known tokens are all computed.

        Returns:
            One result per row, in the order of `output.rows`.
        """
        self._table.forget(output.finished_seq_ids)
        if not output.rows:
            return StepResult(())
        self._copy_blocks(output)
        step = self._take_rows(output)
        batch = self._build_batch(step)
        hidden = self._model(batch, self._backend, self._kv_cache.layers)
        scored = self._score_prompts(step, hidden)
        sampled = self._sample(step, self._model.logits(hidden[batch.logits_indices]))
        return StepResult(
            tuple(
                RowResult(*sampled.get(i, ((), ())), prompt_logprobs=scored.get(i, ())) for i in range(len(output.rows))
            )
        )

    # --- inputs ---

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        if not output.block_copies:
            return
        pairs = [(copy.src, copy.dst) for copy in output.block_copies]
        self._kv_cache.copy_blocks(self._to_device(np.array(pairs, dtype=np.int64)))

    def _take_rows(self, output: SchedulerOutput) -> _Step:
        rows = np.array([self._table.take(row) for row in output.rows], dtype=np.int64)
        num_computed = np.array([row.num_computed_tokens for row in output.rows], dtype=np.int64)
        num_new = np.array([row.num_new_tokens for row in output.rows], dtype=np.int64)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(num_new, out=query_start_loc[1:])
        samples = num_computed + num_new == self._table.num_tokens[rows]
        return _Step(rows, num_computed, num_new, query_start_loc, samples)

    def _build_batch(self, step: _Step) -> ForwardBatch:
        row_of_token = np.repeat(step.rows, step.num_new)  # [num_tokens]
        first_position = np.repeat(step.num_computed - step.query_start_loc[:-1], step.num_new)
        positions = first_position + np.arange(len(row_of_token))  # [num_tokens]
        blocks = self._table.block_tables[row_of_token, positions // self._block_size].astype(np.int64)
        seq_lens = (step.num_computed + step.num_new).astype(np.int32)
        max_seq_len = int(seq_lens.max())
        num_blocks = -(-max_seq_len // self._block_size)
        metadata = AttentionMetadata(
            query_start_loc=self._to_device(step.query_start_loc),
            seq_lens=self._to_device(seq_lens),
            block_tables=self._to_device(self._table.block_tables[step.rows, :num_blocks]),
            slot_mapping=self._to_device(blocks * self._block_size + positions % self._block_size),
            host_query_start_loc=step.query_start_loc,
            host_seq_lens=seq_lens,
            max_query_len=int(step.num_new.max()),
            max_seq_len=max_seq_len,
            num_decodes=int((step.num_new == 1).sum()),
        )
        return ForwardBatch(
            input_ids=self._to_device(self._table.token_ids[row_of_token, positions]),
            positions=self._to_device(positions),
            logits_indices=self._to_device(step.query_start_loc[1:][step.samples].astype(np.int64) - 1),
            attn=metadata,
        )

    # --- outputs ---

    def _sample(
        self, step: _Step, logits: torch.Tensor
    ) -> dict[int, tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]]:
        """Token and log-probabilities of each row that samples, by its place in the step."""
        places = step.samples.nonzero()[0]
        if len(places) == 0:
            return {}
        rows = step.rows[places]
        token_ids = self._model.ops.sample(logits, self._sampling_batch(rows))
        sampled = {}
        logprobs = self._sampled_logprobs(rows, logits, token_ids)
        for i, (place, token_id) in enumerate(zip(places.tolist(), token_ids.tolist(), strict=True)):
            self._table.append_token(rows[i], token_id)
            sampled[place] = ((token_id,), logprobs.get(i, ()))
        return sampled

    def _sampling_batch(self, rows: np.ndarray) -> SamplingBatch:
        table = self._table
        temperature = table.temperature[rows]
        return SamplingBatch(
            temperature=self._to_device(temperature),
            top_k=self._to_device(table.top_k[rows]),
            top_p=self._to_device(table.top_p[rows]),
            min_p=self._to_device(table.min_p[rows]),
            uniform=self._to_device(uniform_numbers(table.seed[rows], table.index[rows], table.num_tokens[rows])),
            all_greedy=not temperature.any(),
        )

    def _sampled_logprobs(
        self, rows: np.ndarray, logits: torch.Tensor, token_ids: torch.Tensor
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        wanted = {i: k for i, row in enumerate(rows) if (k := self._table.params[row].logprobs) is not None}
        if not wanted:
            return {}
        places = list(wanted)
        scores = _logprobs(logits[places], token_ids[places], list(wanted.values()))
        return {place: (score,) for place, score in zip(places, scores, strict=True)}

    def _score_prompts(self, step: _Step, hidden: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log-probability of each prompt token whose predecessor this step computed, where a request asks for it."""
        scored = {}
        for i, row in enumerate(step.rows):
            num_top = self._table.params[row].prompt_logprobs
            start = step.num_computed[i]
            end = min(start + step.num_new[i], self._table.num_prompt_tokens[row] - 1)
            if num_top is None or self._table.index[row] != 0 or start >= end:
                continue
            first = step.query_start_loc[i]
            targets = self._to_device(self._table.token_ids[row, start + 1 : end + 1])
            scores: list[TokenLogprobs] = []
            for offset in range(0, end - start, _SCORED_ROWS_AT_ONCE):
                chunk = slice(offset, min(offset + _SCORED_ROWS_AT_ONCE, end - start))
                logits = self._model.logits(hidden[first + chunk.start : first + chunk.stop])
                scores += _logprobs(logits, targets[chunk], [num_top] * len(logits))
            scored[i] = tuple(scores)
        return scored

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    logprobs, top_ids, top_logprobs = (t.tolist() for t in token_logprobs(logits, token_ids, max(num_top)))
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(ids[:k], values[:k], strict=True)))
        for token_id, logprob, ids, values, k in zip(
            token_ids.tolist(), logprobs, top_ids, top_logprobs, num_top, strict=True
        )
    ]
