"""What edited logits should be, and what tokens are drawn from, written out token by token in float64."""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from hypothesis import strategies as st

from scheduler.sampling_params import SamplingParams


def edited_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    eos_token_ids: Collection[int],
    grammar: Collection[int] | None = None,
) -> np.ndarray:
    """The logits, [vocab_size], of the token after `generated`; `grammar` holds the tokens that it allows."""
    edited = logits.astype(np.float64)
    allowed = set(range(len(edited)))
    if params.allowed_token_ids:
        allowed &= set(params.allowed_token_ids)
    if grammar is not None:
        allowed &= set(grammar)
    for word in params.bad_words:
        beginning = list(word[:-1])
        if not beginning or list(generated[-len(beginning) :]) == beginning:
            allowed.discard(word[-1])
    if len(generated) < params.min_tokens:
        allowed -= set(params.stop_token_ids)
        if not params.ignore_eos:
            allowed -= set(eos_token_ids)
    for token_id, bias in params.logit_bias:
        edited[token_id] += bias
    for token_id in {*prompt, *generated}:
        factor = params.repetition_penalty
        edited[token_id] *= 1 / factor if edited[token_id] > 0 else factor
    for token_id, count in Counter(generated).items():
        edited[token_id] -= params.frequency_penalty * count + params.presence_penalty
    edited[[token_id for token_id in range(len(edited)) if token_id not in allowed]] = -np.inf
    return edited


def kept_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What a token is drawn from, [vocab_size]: cut by min_p, then top_k, then top_p; equals stay together."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < params.min_p] = 0
    if 0 < params.top_k < len(probs):
        probs[probs < np.sort(probs)[-params.top_k]] = 0
    ordered = np.sort(probs)[::-1]
    mass = np.cumsum(ordered)
    num_kept = max(1, int(((mass - ordered) < params.top_p * mass[-1]).sum()))
    probs[probs < ordered[num_kept - 1]] = 0
    return probs / probs.sum()


@st.composite
def edit_params(draw: st.DrawFn, vocab_size: int, **others: object) -> SamplingParams:
    """Parameters with any mix of edits, none of them among the mixes."""
    token_ids = st.integers(0, vocab_size - 1)

    def sometimes(strategy: st.SearchStrategy, otherwise: object) -> object:
        return draw(strategy) if draw(st.integers(0, 2)) == 0 else otherwise

    biases = st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=4)
    words = st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=6)
    return SamplingParams(
        max_tokens=20,
        repetition_penalty=sometimes(st.sampled_from([0.5, 0.9, 1.1, 2.0]), 1.0),
        frequency_penalty=sometimes(st.sampled_from([-2.0, 0.3, 2.0]), 0.0),
        presence_penalty=sometimes(st.sampled_from([-2.0, 0.7, 2.0]), 0.0),
        logit_bias=tuple(sometimes(biases, {}).items()),
        allowed_token_ids=sometimes(st.lists(token_ids, min_size=1, unique=True).map(tuple), ()),
        bad_words=tuple(sometimes(words, [])),
        min_tokens=sometimes(st.integers(1, 8), 0),
        stop_token_ids=sometimes(st.lists(token_ids, max_size=3).map(tuple), ()),
        ignore_eos=draw(st.booleans()),
        **others,
    )
