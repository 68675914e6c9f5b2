"""Changes to the logits of a step's rows before tokens are chosen: biases, penalties, and tokens that are forbidden.

Plain torch on any device, in place, vectorised over the rows that have any of it; nothing here waits for the device.
Knows no sequences: what each row asks for comes as coordinates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

FORBIDDEN = float("-inf")
_ELEMENTS_AT_ONCE = 1 << 22  # of temporaries: a full batch with a large vocabulary would need a gigabyte otherwise


@dataclass(frozen=True, slots=True)
class Penalties:
    """What the logits of some rows lose for the tokens that occurred in them, and those, in rows of a larger table."""

    rows: torch.Tensor  # [num_penalised] int64, of the logits, no two the same
    repetition: torch.Tensor  # [num_penalised] float32, > 0
    frequency: torch.Tensor  # [num_penalised] float32
    presence: torch.Tensor  # [num_penalised] float32
    table_rows: torch.Tensor  # [num_penalised] int64
    num_occurred: torch.Tensor  # [num_penalised] int64, distinct tokens: the first places of the table's row
    host_num_occurred: npt.NDArray[np.int64]  # the same on the host
    token_ids: torch.Tensor  # [num_table_rows, num_places] int32
    counts: torch.Tensor  # [num_table_rows, num_places] int32, how often each was generated; 0 = only in the prompt


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """All edits of one step. Rows are those of the logits."""

    bias_rows: torch.Tensor  # [num_biases] int64
    bias_token_ids: torch.Tensor  # [num_biases] int64, none twice in a row
    biases: torch.Tensor  # [num_biases] float32
    penalties: Penalties | None
    forbidden_rows: torch.Tensor  # [num_forbidden] int64
    forbidden_token_ids: torch.Tensor  # [num_forbidden] int64
    masked_rows: torch.Tensor  # [num_masked] int64, no two the same
    masks: torch.Tensor  # [num_masked, num_bytes] uint8; bit i, from the lowest of the first byte, allows token i


def apply_edits(logits: torch.Tensor, edits: LogitEdits) -> None:
    """Edit [num_rows, vocab_size] float32 logits in place, which must be contiguous. Rows without edits keep every bit.

    Biases come first, then the penalties for repetition, frequency and presence: the order of vLLM. What is forbidden
    is forbidden whatever else was added, so it comes last, where no sum with an infinity is needed.
    """
    if edits.biases.numel():
        place = (edits.bias_rows, edits.bias_token_ids)
        logits.index_put_(place, logits[place] + edits.biases)
    if edits.penalties is not None:
        _penalise(logits, edits.penalties)
    if edits.forbidden_rows.numel():
        _forbid(logits, edits.forbidden_rows, edits.forbidden_token_ids)
    if edits.masked_rows.numel():
        _keep_allowed(logits, edits.masked_rows, edits.masks)


def _penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    """Repetition divides positive logits and multiplies others (CTRL, Keskar et al. 2019, section 4.1).

    Frequency is subtracted as often as the token was generated, presence once if it was. The rows' tokens are laid
    end to end, so that a row with many costs the others nothing.
    """
    flat_logits, vocab_size, num_places = logits.view(-1), logits.shape[1], penalties.token_ids.shape[1]
    num_occurred = penalties.host_num_occurred
    for part in _parts(len(num_occurred), int(num_occurred.max(initial=0))):
        lengths = penalties.num_occurred[part]
        each = partial(torch.repeat_interleave, repeats=lengths, output_size=int(num_occurred[part].sum()))
        table_starts = penalties.table_rows[part] * num_places
        # One entry a token from here on.
        entry = each(table_starts - lengths.cumsum(0) + lengths)
        entry += torch.arange(len(entry), device=logits.device)
        token_ids = penalties.token_ids.view(-1).index_select(0, entry)
        counts = penalties.counts.view(-1).index_select(0, entry)
        target = each(penalties.rows[part] * vocab_size) + token_ids
        old, repetition = flat_logits.index_select(0, target), each(penalties.repetition[part])
        new = torch.where(old > 0, old / repetition, old * repetition)
        new -= each(penalties.frequency[part]) * counts
        new -= each(penalties.presence[part]) * (counts > 0)
        flat_logits.index_copy_(0, target, new)


def _forbid(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    logits.index_put_((rows, token_ids), logits.new_full((), FORBIDDEN))


def _keep_allowed(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """A table turns each byte into eight addends: on a CPU six times as fast as filling where a bit is not set."""
    vocab_size = logits.shape[1]
    bytes_ = torch.arange(256, device=logits.device)[:, None]
    bits = (bytes_ >> torch.arange(8, device=logits.device)) & 1
    addends_of_byte = logits.new_zeros(256, 8).masked_fill_(bits == 0, FORBIDDEN)
    for part in _parts(len(rows), vocab_size):
        addends = functional.embedding(masks[part].int(), addends_of_byte)  # [num_rows, num_bytes, 8]
        logits.index_add_(0, rows[part], addends.flatten(1)[:, :vocab_size])


def _parts(num_rows: int, row_size: int) -> Iterator[slice]:
    """Slices of so many rows as fit in the memory that temporaries may take; one row always does."""
    step = max(1, _ELEMENTS_AT_ONCE // max(1, row_size))
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
