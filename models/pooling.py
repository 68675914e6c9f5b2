"""Embeddings: one vector for a prompt, out of the hidden states of its tokens.

Keeps the sums of prompts that are computed in chunks. Knows the rows of a step; must not know the model.
"""

import torch

from models.row_table import RowTable
from models.step_inputs import StepRows
from models.step_outputs import Embeddings, to_host


class Pooler:
    """Pools the hidden states of the rows that ask for it, chunk by chunk."""

    def __init__(self) -> None:
        """Begin with no sums."""
        self._sums: dict[int, torch.Tensor] = {}  # by row of the table, [hidden_size] float32

    def pool(self, table: RowTable, step: StepRows, hidden: torch.Tensor) -> Embeddings | None:
        """Take in the step's normed hidden states, [num_tokens, hidden_size]; None where no prompt is complete.

        A mean is over all tokens of the prompt, summed in float32; "last" is the last token's hidden state.
        """
        if not table.poolings:
            return None
        places, vectors = [], []
        for place, row in enumerate(step.rows.tolist()):
            if row not in table.poolings:
                continue
            vector = self._vector(table, step, place, hidden)
            if vector is not None:
                places.append(place)
                vectors.append(vector)
        return Embeddings(places, to_host(torch.stack(vectors))) if places else None

    def _vector(self, table: RowTable, step: StepRows, place: int, hidden: torch.Tensor) -> torch.Tensor | None:
        row = int(step.rows[place])
        first, end = step.query_start_loc[place : place + 2].tolist()
        num_tokens = int(table.num_prompt_tokens[row])
        is_complete = int(step.num_computed[place]) + end - first == num_tokens
        if table.poolings[row] == "last":
            return hidden[end - 1].float() if is_complete else None
        total = hidden[first:end].sum(dim=0, dtype=torch.float32)
        # A row that was taken away before its prompt was complete begins again: what it left is not part of the sum.
        earlier = self._sums.pop(row, None)
        if step.num_computed[place] > 0:
            assert earlier is not None, "a mean needs the hidden states of the prompt from its first token"
            total += earlier
        if is_complete:
            return total / num_tokens
        self._sums[row] = total
        return None
