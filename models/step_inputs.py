"""The inputs of one step: gathered by index from the row table, then sent to the device in one copy.

Everything here is known on the host before the step before it has ended, but for the ids of tokens that are still
being sampled: their places are sent, and the device fills them in. Must not know the model or the scheduler's state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.metadata import AttentionMetadata
from kernels.sampling.logit_edits import LogitEdits
from kernels.sampling.sampling_batch import SamplingBatch
from models.candidates import wanted_candidates
from models.forward_batch import ForwardBatch
from models.row_table import RowTable
from models.sampler import uniform_numbers_at
from models.step_edits import StepEditor
from scheduler.output import BlockCopy, SchedulerOutput

_OF_RUNNER = ("sampled_rows", "logprob_places", "candidate_places", "target_ids", "block_copies")
_NO_IDS = np.empty(0, np.int64)
_ALIGNMENT = 64  # bytes; kernels load 16 at once, and a pointer's alignment must not change from step to step


@dataclass(frozen=True, slots=True)
class StepRows:
    """Where each row of the step stands. Host arrays, one entry per row of the batch."""

    rows: np.ndarray  # [num_rows] int64, rows of the row table
    num_computed: np.ndarray  # [num_rows] int64, before this step
    num_new: np.ndarray  # [num_rows] int64
    query_start_loc: np.ndarray  # [num_rows + 1] int32
    seq_lens: np.ndarray  # [num_rows] int32, after this step
    samples: np.ndarray  # [num_rows] bool: all known tokens are computed after this step, and the next is wanted


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Prompt tokens whose log-probabilities this step's hidden states give."""

    place: int  # the row's place in the step
    first: int  # the token of the batch that predicts the first of them
    target_ids: np.ndarray  # [num_targets] int64
    num_top: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the step reads, on the device."""

    batch: ForwardBatch
    sampling: SamplingBatch  # one entry per row that samples, as logits_indices has them
    edits: LogitEdits | None  # of the same rows' logits
    sampled_rows: torch.Tensor  # [num_sampled] int64, rows of the row table
    num_logprobs: dict[int, int]  # sampled row -> how many best tokens, where log-probabilities are wanted
    logprob_places: torch.Tensor  # [len(num_logprobs)] int64, these rows
    candidates: list[tuple[int, int]]  # how many are wanted of which sampled row
    candidate_places: torch.Tensor  # [len(candidates)] int64, these rows
    target_ids: torch.Tensor  # [num_targets] int64, of all scored prompts end to end
    block_copies: torch.Tensor  # [num_copies, 2] int64, source and destination


def take_rows(table: RowTable, output: SchedulerOutput) -> StepRows:
    """Bring the row table up to date with the scheduler's messages."""
    rows = np.array([table.take(row) for row in output.rows], np.int64)
    num_computed = np.array([row.num_computed_tokens for row in output.rows], np.int64)
    num_new = np.array([row.num_new_tokens for row in output.rows], np.int64)
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
    num_new.cumsum(out=query_start_loc[1:])
    seq_lens = num_computed + num_new
    samples = seq_lens == table.num_tokens[rows]
    if table.poolings:
        samples &= [row not in table.poolings for row in rows.tolist()]
    return StepRows(rows, num_computed, num_new, query_start_loc, seq_lens.astype(np.int32), samples)


def scored_prompts(table: RowTable, step: StepRows) -> list[ScoredPrompt]:
    """The prompt tokens whose predecessor this step computes, where a request asks for their scores."""
    if not table.num_prompt_logprobs:
        return []
    scored = []
    for place, row in enumerate(step.rows.tolist()):
        if row not in table.num_prompt_logprobs:
            continue
        start = int(step.num_computed[place])
        end = min(start + int(step.num_new[place]), int(table.num_prompt_tokens[row]) - 1)
        if start < end:
            targets = table.token_ids[row, start + 1 : end + 1]
            first = int(step.query_start_loc[place])
            scored.append(ScoredPrompt(place, first, targets.copy(), table.num_prompt_logprobs[row]))
    return scored


def build_inputs(
    table: RowTable,
    step: StepRows,
    output: SchedulerOutput,
    scored: list[ScoredPrompt],
    last_token_ids: torch.Tensor,  # [max_num_seqs] int64, on the device: the last token that each row sampled
    editor: StepEditor,
) -> StepInputs:
    """Gather the step's inputs and send them to the device. Waits for nothing there.

    Call it before the row table counts the tokens that this step samples.
    """
    row_of_token, positions = _places_of_tokens(step)
    block_of_token, offset = np.divmod(positions, table.block_size)
    num_blocks = -(-int(step.seq_lens.max()) // table.block_size)
    sampled_rows = step.rows[step.samples]
    pending_places = (positions >= table.num_known_tokens[row_of_token]).nonzero()[0]
    num_logprobs = _of_sampled(table.num_logprobs, sampled_rows)
    candidates = wanted_candidates(table.num_candidates, sampled_rows.tolist()) if table.num_candidates else []
    host = {
        "query_start_loc": step.query_start_loc,
        "seq_lens": step.seq_lens,
        "block_tables": table.block_tables[step.rows, :num_blocks],
        "slot_mapping": table.block_tables[row_of_token, block_of_token] * np.int64(table.block_size) + offset,
        "input_ids": table.token_ids[row_of_token, positions],
        "positions": positions,
        "logits_indices": step.query_start_loc[1:][step.samples].astype(np.int64) - 1,
        "pending_places": pending_places,
        "pending_rows": row_of_token[pending_places],
        "sampled_rows": sampled_rows,
        "logprob_places": np.array([*num_logprobs], np.int64) if num_logprobs else _NO_IDS,
        "candidate_places": np.array([place for _, place in candidates], np.int64) if candidates else _NO_IDS,
        "target_ids": np.concatenate([s.target_ids for s in scored]) if scored else _NO_IDS,
        "block_copies": block_pairs(output.block_copies),
        **_sampling_arrays(table, sampled_rows),
        **editor.host_arrays(table, step.rows, step.samples, output.grammar_masks),
    }
    on_device = send_to_device(host, last_token_ids.device)
    if len(pending_places):
        pending_ids = last_token_ids[on_device["pending_rows"]]
        on_device["input_ids"].index_copy_(0, on_device["pending_places"], pending_ids)
    attn = AttentionMetadata(
        **{name: on_device[name] for name in ("query_start_loc", "seq_lens", "block_tables", "slot_mapping")},
        host_query_start_loc=step.query_start_loc,
        host_seq_lens=step.seq_lens,
    )
    return StepInputs(
        batch=ForwardBatch(on_device["input_ids"], on_device["positions"], on_device["logits_indices"], attn),
        sampling=SamplingBatch(
            **{name: on_device[name] for name in ("temperature", "top_k", "top_p", "min_p", "uniform")},
            all_greedy=not host["temperature"].any(),
        ),
        edits=editor.edits(on_device, host),
        num_logprobs=num_logprobs,
        candidates=candidates,
        **{name: on_device[name] for name in _OF_RUNNER},
    )


def _places_of_tokens(step: StepRows) -> tuple[np.ndarray, np.ndarray]:  # both [num_tokens] int64
    """The row of each token of the step, and its position in the sequence."""
    num_tokens = int(step.query_start_loc[-1])
    if num_tokens == len(step.rows):  # most steps: every row computes one token
        return step.rows, step.num_computed
    first_position = np.repeat(step.num_computed - step.query_start_loc[:-1], step.num_new)
    return np.repeat(step.rows, step.num_new), first_position + np.arange(num_tokens)


def _of_sampled(values: Mapping[int, int], sampled_rows: np.ndarray) -> dict[int, int]:
    """Of values by row of the row table, those of rows that sample, by their places among these."""
    if not values:
        return {}
    return {place: values[row] for place, row in enumerate(sampled_rows.tolist()) if row in values}


def block_pairs(copies: Sequence[BlockCopy]) -> np.ndarray:  # [num_copies, 2] int64
    """Source and destination of copies."""
    return np.array([(copy.src, copy.dst) for copy in copies], np.int64).reshape(-1, 2)


def _sampling_arrays(table: RowTable, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "temperature": table.temperature[rows],
        "top_k": table.top_k[rows],
        "top_p": table.top_p[rows],
        "min_p": table.min_p[rows],
        "uniform": uniform_numbers_at(table.random_key[rows], table.num_tokens[rows]),
    }


def send_to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays as tensors on `device`: on a CPU they share memory, on a GPU all cross in one copy."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    staged, places = pack(arrays, pin_memory=True)
    # The staging memory goes back to torch's pinned allocator, which does not reuse it before the copy is done.
    return unpack(staged.to(device, non_blocking=True), arrays, places)


def pack(arrays: Mapping[str, np.ndarray], *, pin_memory: bool) -> tuple[torch.Tensor, list[int]]:
    """Lay arrays end to end in one host tensor.

    Returns:
        [num_bytes] uint8, and the place of each array's first byte, a multiple of the alignment.
    """
    places, end = [], 0
    for array in arrays.values():
        places.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=pin_memory)
    buffer = staged.numpy()
    for array, place in zip(arrays.values(), places, strict=True):
        buffer[place : place + array.nbytes].view(array.dtype)[:] = array.ravel()
    return staged, places


def unpack(packed: torch.Tensor, arrays: Mapping[str, np.ndarray], places: list[int]) -> dict[str, torch.Tensor]:
    """Views of a packed tensor, on any device, with the names, types and shapes of the arrays that it was made of."""
    return {
        name: packed[place : place + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for (name, array), place in zip(arrays.items(), places, strict=True)
    }


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return dtype
