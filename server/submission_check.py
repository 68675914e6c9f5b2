"""The engine's own look at the token ids of a request: one that the model does not have would end the engine.

The edge has checked them already, and tells callers more. Knows no scheduler.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from scheduler.admission import RequestRefused
from server.messages import Submit
from server.token_ids import TokenIds


def refuse_unknown_token_ids(message: Submit, vocab_size: int) -> None:
    """Check every id of the prompt and of the sampling parameters.

    Raises:
        RequestRefused: naming the field.
    """
    params = message.params
    token_ids: dict[str, Sequence[int]] = {
        "prompt": _extremes(message.prompt_token_ids),
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": [*chain.from_iterable(params.bad_words)],
    }
    for param, ids in token_ids.items():
        if not 0 <= min(ids, default=0) <= max(ids, default=0) < vocab_size:
            raise RequestRefused(f"{param} has a token id of no token; ids go from 0 to {vocab_size - 1}.", param)


def _extremes(token_ids: TokenIds) -> tuple[int, ...]:
    """The least and the greatest: packed, 128,000 of them hold the engine for microseconds, one by one for 4 ms."""
    packed = np.frombuffer(token_ids.packed(), np.intc)
    return (int(packed.min()), int(packed.max())) if packed.size else ()
