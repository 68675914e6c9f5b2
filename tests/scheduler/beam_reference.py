"""Beam search over the fake model as one reads it in a book: whole token lists, no blocks, no scheduler.

The rules are those of transformers' `generate(num_beams=...)`: of all continuations the best `width` that do not end
live on; those that end count only if they are among the best `width` themselves; an answer's score is its
log-probability divided by its generated length to the power `length_penalty`.
"""

from scheduler.output import FinishReason
from scheduler.sampling_params import SamplingParams
from tests.scheduler.fake_runner import VOCAB_SIZE, Prefixes, end_tokens, next_candidates

Answer = tuple[list[int], FinishReason]


def expected_beams(prompt: list[int], params: SamplingParams, eos: frozenset[int], realm: int = 0) -> list[Answer]:
    """The n best answers and why each ended, best first."""
    search = params.beam_search
    assert search is not None
    if params.max_tokens == 0:
        return [([], "length")] * params.n
    ends = end_tokens(params, eos)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    answers: list[tuple[float, list[int]]] = []  # at most `width`, best first
    for num_generated in range(1, params.max_tokens + 1):
        is_last = num_generated == params.max_tokens
        divisor = num_generated**search.length_penalty
        forbidden = ends if num_generated - 1 < params.min_tokens else ()
        continuations = []
        for score, generated in beams:
            digest = Prefixes([*prompt, *generated], realm).digests[-1]
            for token_id, logprob in next_candidates(digest, VOCAB_SIZE, forbidden):
                continuations.append((score + logprob, [*generated, token_id]))
        best = sorted(continuations, key=lambda c: -c[0])
        ended = [
            (score / divisor, generated)
            for score, generated in best[: search.width]
            if is_last or generated[-1] in ends
        ]
        answers = sorted([*answers, *ended], key=lambda a: -a[0])[: search.width]
        beams = [] if is_last else [c for c in best if c[1][-1] not in ends][: search.width]
        is_full = len(answers) == search.width
        if not beams or (is_full and (search.early_stopping or beams[0][0] / divisor <= answers[-1][0])):
            break
    return [(tokens, "stop" if tokens[-1] in ends else "length") for _, tokens in answers[: params.n]]
