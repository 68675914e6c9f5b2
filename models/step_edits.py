"""The logit edits of one step: gathered from the rows that ask for any, sent along with the step's other inputs.

Keeps the tokens that penalised rows have seen on the device, so that a step sends only what changed. Must not know
the model or the scheduler's state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling.logit_edits import LogitEdits, Penalties
from models.row_edits import RowEdits
from models.row_table import RowTable
from scheduler.output import GrammarMask

_MIN_PLACES = 1024  # of the table of occurrences: below it growing costs more than the memory


@dataclass(frozen=True, slots=True)
class _EditedRow:
    place: int  # among the rows that sample
    row: int  # of the row table
    edits: RowEdits


class StepEditor:
    """Makes the edits of each step, in the order of the steps."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        """Reserve nothing: the table of occurrences is made for the first row that is penalised, and grows."""
        self._mask_bytes = 4 * -(-vocab_size // 32)  # whole words of 32 bits, as grammars have them
        # Of row r of the row table: its distinct tokens, and how often each was generated. Both [max_num_seqs, places].
        self._token_ids = torch.zeros((max_num_seqs, 0), dtype=torch.int32, device=device)
        self._counts = torch.zeros((max_num_seqs, 0), dtype=torch.int32, device=device)

    def host_arrays(
        self,
        table: RowTable,
        rows: np.ndarray,  # [num_rows] int64, of the row table
        samples: np.ndarray,  # [num_rows] bool
        grammar_masks: tuple[GrammarMask, ...],
    ) -> dict[str, np.ndarray]:
        """What the step's edits are made of, to be sent to the device; empty where no row that samples has any."""
        if not table.edits and not grammar_masks:
            return {}
        sampled_rows = rows[samples].tolist()
        edited = [
            _EditedRow(place, row, table.edits[row]) for place, row in enumerate(sampled_rows) if row in table.edits
        ]
        sampled_place = np.cumsum(samples) - 1
        grammar = {int(sampled_place[mask.place]): mask.bitmask for mask in grammar_masks if samples[mask.place]}
        if not edited and not grammar:
            return {}
        return (
            _bias_arrays(edited)
            | _forbidden_arrays(edited, table)
            | self._mask_arrays(edited, grammar)
            | self._penalty_arrays(edited)
        )

    def edits(self, arrays: Mapping[str, torch.Tensor], host: Mapping[str, np.ndarray]) -> LogitEdits | None:
        """The edits that the arrays describe, which are on the device by now and still on the host."""
        if "bias_rows" not in arrays:
            return None
        names = ("bias_rows", "bias_token_ids", "biases", "forbidden_rows", "forbidden_token_ids")
        return LogitEdits(
            **{name: arrays[name] for name in (*names, "masked_rows", "masks")},
            penalties=self._penalties(arrays, host["num_occurred"]),
        )

    def _mask_arrays(self, edited: list[_EditedRow], grammar: Mapping[int, bytes]) -> dict[str, np.ndarray]:
        """One mask for each row that has any: what is allowed at all, of that what its grammar allows."""
        masks: dict[int, np.ndarray] = {}
        for place, bitmask in grammar.items():
            assert len(bitmask) == self._mask_bytes, f"a bitmask of {len(bitmask)} bytes, not {self._mask_bytes}"
            masks[place] = np.frombuffer(bitmask, np.uint8)
        for row in edited:
            allowed = row.edits.mask(self._mask_bytes)
            if allowed is not None:
                masks[row.place] = masks[row.place] & allowed if row.place in masks else allowed
        return {
            "masked_rows": np.fromiter(masks.keys(), np.int64, len(masks)),
            "masks": np.stack([*masks.values()]) if masks else np.empty((0, self._mask_bytes), np.uint8),
        }

    def _penalty_arrays(self, edited: list[_EditedRow]) -> dict[str, np.ndarray]:
        """The penalties of the rows that have seen any token, and what the table of occurrences lacks of those."""
        penalised = [row for row in edited if len(row.edits.occurrences)]
        rows, places, token_ids, counts = np.concatenate(
            [_take_changes(penalised), *_take_beginnings(penalised)], axis=1
        )
        penalties = np.array([row.edits.penalties for row in penalised], np.float32).reshape(-1, 3)
        return {
            "changed_rows": rows,
            "changed_places": places,
            "changed_token_ids": token_ids.astype(np.int32),
            "changed_counts": counts.astype(np.int32),
            "penalised_places": np.array([row.place for row in penalised], np.int64),
            "penalised_rows": np.array([row.row for row in penalised], np.int64),
            "num_occurred": np.array([len(row.edits.occurrences) for row in penalised], np.int64),
            "penalties": np.ascontiguousarray(penalties.T),
        }

    def _penalties(self, arrays: Mapping[str, torch.Tensor], host_num_occurred: np.ndarray) -> Penalties | None:
        """Bring the table of occurrences up to date, and point at the penalised rows in it."""
        if not len(host_num_occurred):
            return None
        self._reserve(int(host_num_occurred.max()))
        changed = (arrays["changed_rows"], arrays["changed_places"])
        self._token_ids.index_put_(changed, arrays["changed_token_ids"])
        self._counts.index_put_(changed, arrays["changed_counts"])
        repetition, frequency, presence = arrays["penalties"].unbind()
        return Penalties(
            rows=arrays["penalised_places"],
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            table_rows=arrays["penalised_rows"],
            num_occurred=arrays["num_occurred"],
            host_num_occurred=host_num_occurred,
            token_ids=self._token_ids,
            counts=self._counts,
        )

    def _reserve(self, num_places: int) -> None:
        """Let each row of the table have so many tokens."""
        num_rows, num_reserved = self._token_ids.shape
        if num_places > num_reserved:
            grown = max(_MIN_PLACES, 1 << (num_places - 1).bit_length())
            for name in ("_token_ids", "_counts"):
                old = getattr(self, name)
                new = torch.zeros((num_rows, grown), dtype=old.dtype, device=old.device)
                new[:, :num_reserved] = old
                setattr(self, name, new)


def _bias_arrays(edited: list[_EditedRow]) -> dict[str, np.ndarray]:
    biased = [row for row in edited if len(row.edits.biases)]
    places = np.array([row.place for row in biased], np.int64)
    return {
        "bias_rows": np.repeat(places, [len(row.edits.biases) for row in biased]) if biased else places,
        "bias_token_ids": np.concatenate([*(row.edits.bias_token_ids for row in biased), np.empty(0, np.int64)]),
        "biases": np.concatenate([*(row.edits.biases for row in biased), np.empty(0, np.float32)]),
    }


def _forbidden_arrays(edited: list[_EditedRow], table: RowTable) -> dict[str, np.ndarray]:
    places: list[int] = []
    token_ids: list[int] = []
    for row in edited:
        if not row.edits.may_forbid:
            continue
        num_prompt_tokens = table.num_prompt_tokens[row.row]
        generated = table.token_ids[row.row, num_prompt_tokens : table.num_known_tokens[row.row]]
        found = row.edits.forbidden(generated, int(table.num_tokens[row.row] - num_prompt_tokens))
        token_ids += found
        places += [row.place] * len(found)
    return {"forbidden_rows": np.array(places, np.int64), "forbidden_token_ids": np.array(token_ids, np.int64)}


def _take_beginnings(penalised: list[_EditedRow]) -> Iterator[np.ndarray]:
    """What the table lacks of rows that are new: row, place, token id and count, [4, num_tokens] int64 each."""
    for row in penalised:
        beginning = row.edits.occurrences.take_beginning()
        if beginning is not None:
            yield np.concatenate([np.full((1, beginning.shape[1]), row.row), beginning])


def _take_changes(penalised: list[_EditedRow]) -> np.ndarray:
    """The same of all other rows, whose few new tokens are gathered faster in a list."""
    changes = [(row.row, *change) for row in penalised for change in row.edits.occurrences.take_changes()]
    return np.array(changes, np.int64).reshape(-1, 4).T
