"""Beam search: which continuations of a request's live sequences go on, which are complete, and when the search ends.

The semantics are those of `generate` in transformers 5 (num_beams, length_penalty, early_stopping, one prompt). Moves
sequences through the queues alone, and knows neither blocks nor steps: the candidates of a beam are kept here until
those of all beams are in, whatever becomes of its blocks in the meantime.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from heapq import merge
from typing import TYPE_CHECKING

from scheduler.output import FinishReason, RowResult, SequenceFailure, SequenceUpdate, TokenLogprobs
from scheduler.request import Request, Sequence
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from scheduler.queues import SequenceQueues


@dataclass(frozen=True, slots=True)
class _ScoredPath:
    """The log-probabilities of a beam's tokens, last first: beams share those of the tokens that they share."""

    before: "_ScoredPath | None"
    last: TokenLogprobs


@dataclass(eq=False, slots=True)
class _Beam:
    """A live sequence and how likely it is."""

    sequence: Sequence
    score: float = 0.0  # the sum of its generated tokens' log-probabilities
    path: _ScoredPath | None = None  # where log-probabilities are asked for
    candidates: tuple[tuple[int, float], ...] | None = None  # of its next token; None = they are still to come


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A beam with one more token."""

    beam: _Beam
    token_id: int
    score: float
    path: _ScoredPath | None


@dataclass(frozen=True, slots=True)
class _Answer:
    """A complete sequence of tokens."""

    score: float  # log-probability divided by the length to the power of the length penalty
    token_ids: tuple[int, ...]
    path: _ScoredPath | None
    finish_reason: FinishReason
    stop_token_id: int | None


@dataclass(eq=False, slots=True)
class BeamGroup:
    """One request's search."""

    beams: dict[int, _Beam]  # by seq_id, the likeliest first
    num_cached_tokens: int  # prompt tokens that were not computed
    answers: list[_Answer] = field(default_factory=list)  # the best so far, best first; `width` of them at most
    num_recomputed_tokens: int = 0  # of beams that are dead

    def has_candidates_of(self, sequence: Sequence) -> bool:
        """Whether those of its next token are in, so that it waits for those of the other beams."""
        beam = self.beams.get(sequence.seq_id)
        return beam is not None and beam.candidates is not None


def num_candidates(params: SamplingParams, num_end_tokens: int) -> int:
    """How many of its likeliest tokens each row of a beam search must bring.

    The `width` best continuations that go on may all be of one beam, behind every token that would end it.
    """
    assert params.beam_search is not None
    width = params.beam_search.width
    return max(2 * width, width + num_end_tokens, params.logprobs or 0)


def advance_beams(
    sequence: Sequence, result: RowResult, queues: "SequenceQueues", eos_token_ids: Collection[int]
) -> list[SequenceUpdate]:
    """Take in the candidates of a sequence whose tokens are all computed; with the last beam's, go on by one token.

    Beams fork and die in `queues`. A sequence that no token may follow brings no candidates, and dies.

    Returns:
        Nothing until the search has ended; then one update for each of the n answers, best first.
    """
    request = sequence.request
    if request.beams is None:
        request.beams = BeamGroup({sequence.seq_id: _Beam(sequence)}, sequence.num_cached_tokens)
    group = request.beams
    beam = group.beams[sequence.seq_id]
    assert beam.candidates is None, f"sequence {sequence.seq_id} was computed while it waited for other beams"
    beam.candidates = result.candidates
    if any(other.candidates is None for other in group.beams.values()):
        return []
    if request.params.max_tokens == 0:
        group.answers = [_Answer(0.0, (), None, "length", None)] * request.params.n
        return _end(request, group, queues)
    survivors = _choose(request, group, eos_token_ids)
    if survivors:
        _go_on(group, survivors, queues)
        return []
    return _end(request, group, queues)


def _choose(request: Request, group: BeamGroup, eos_token_ids: Collection[int]) -> list[_Continuation]:
    """Complete the continuations that end among the `width` best of all; the `width` best others survive, best first.

    Nothing survives once the search is over: no better answer can be expected, or the length is reached.
    """
    params = request.params
    search = params.beam_search
    assert search is not None
    length = next(iter(group.beams.values())).sequence.num_generated_tokens + 1
    scale = float(length) ** search.length_penalty
    survivors: list[_Continuation] = []
    complete = list(group.answers)
    for rank, continuation in enumerate(_continuations(group, params)):
        if rank >= search.width and (len(survivors) == search.width or length == params.max_tokens):
            break
        stop_token_id = _stop_token(continuation.token_id, length, params, eos_token_ids)
        if stop_token_id is None and length < params.max_tokens:
            if len(survivors) < search.width:
                survivors.append(continuation)
        elif rank < search.width:
            complete.append(_complete(continuation, scale, stop_token_id))
    # A stable sort: among equals the earlier answer stands.
    group.answers = sorted(complete, key=lambda answer: -answer.score)[: search.width]
    if not survivors or len(group.answers) < search.width:
        return survivors
    # What transformers expects of the likeliest beam, at best: the score that it would have if it ended here.
    can_improve = survivors[0].score / scale > group.answers[-1].score
    return survivors if can_improve and not search.early_stopping else []


def _continuations(group: BeamGroup, params: SamplingParams) -> Iterator[_Continuation]:
    """Every beam with each of its candidates, the likeliest first. Made as they are asked for: few of them are."""
    of_beams = (_continuations_of(beam, params.logprobs) for beam in group.beams.values())
    return merge(*of_beams, key=lambda continuation: -continuation.score)


def _continuations_of(beam: _Beam, num_logprobs: int | None) -> Iterator[_Continuation]:
    assert beam.candidates is not None
    for token_id, logprob in beam.candidates:
        path = None
        if num_logprobs is not None:
            path = _ScoredPath(beam.path, TokenLogprobs(token_id, logprob, beam.candidates[:num_logprobs]))
        yield _Continuation(beam, token_id, beam.score + logprob, path)


def _stop_token(token_id: int, length: int, params: SamplingParams, eos_token_ids: Collection[int]) -> int | None:
    """The token, if it ends an answer whose last it is."""
    is_end = token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)
    return token_id if is_end and length > params.min_tokens else None


def _complete(continuation: _Continuation, scale: float, stop_token_id: int | None) -> _Answer:
    sequence = continuation.beam.sequence
    return _Answer(
        score=continuation.score / scale,
        token_ids=(*sequence.token_ids[sequence.num_prompt_tokens :], continuation.token_id),
        path=continuation.path,
        finish_reason="length" if stop_token_id is None else "stop",
        stop_token_id=stop_token_id,
    )


def _go_on(group: BeamGroup, survivors: list[_Continuation], queues: "SequenceQueues") -> None:
    """Let the survivors be the beams: the best of each beam takes its sequence over, the others fork from it."""
    heirs: dict[_Beam, _Continuation] = {}  # of the sequences
    for continuation in survivors:
        heirs.setdefault(continuation.beam, continuation)
    for beam in group.beams.values():
        if beam not in heirs:  # before others fork: it makes room for them
            _give_up(group, beam, queues)
    beams = []
    for continuation in survivors:
        sequence = continuation.beam.sequence
        if heirs[continuation.beam] is not continuation:
            sequence = queues.branch(sequence, continuation.token_id)
        beams.append(_Beam(sequence, continuation.score, continuation.path))
    for continuation in heirs.values():  # after others have forked
        sequence = continuation.beam.sequence
        assert sequence.num_pending_tokens == 0, f"sequence {sequence.seq_id} goes on while a step computes it"
        sequence.token_ids.append(continuation.token_id)
    group.beams = {beam.sequence.seq_id: beam for beam in beams}


def _give_up(group: BeamGroup, beam: _Beam, queues: "SequenceQueues") -> None:
    group.num_recomputed_tokens += beam.sequence.num_recomputed_tokens
    queues.finish(beam.sequence, None)


def _end(request: Request, group: BeamGroup, queues: "SequenceQueues") -> list[SequenceUpdate]:
    """End every sequence; the first ones stand for the answers in what is reported of the request."""
    answers = group.answers[: request.params.n]
    failure = _shortage(request.params, len(answers)) if len(answers) < request.params.n else None
    for position, beam in enumerate(list(group.beams.values())):
        sequence = beam.sequence
        if position and position >= len(answers):
            _give_up(group, beam, queues)
            continue
        sequence.index = position
        queues.finish(sequence, "error" if failure is not None else answers[position].finish_reason)
        group.num_recomputed_tokens += sequence.num_recomputed_tokens
        if failure is None:  # not before its blocks have been released under the tokens that they hold
            sequence.token_ids[sequence.num_prompt_tokens :] = answers[position].token_ids
    group.beams = {}
    if failure is not None:
        return [
            SequenceUpdate(request.request_id, index, finish_reason="error", failure=failure)
            for index in range(request.params.n)
        ]
    return [_update(request, group, index, answer) for index, answer in enumerate(answers)]


def _update(request: Request, group: BeamGroup, index: int, answer: _Answer) -> SequenceUpdate:
    """The only update of an answer. What the request cost is told with the first."""
    return SequenceUpdate(
        request_id=request.request_id,
        index=index,
        token_ids=answer.token_ids,
        logprobs=_logprobs(answer.path),
        finish_reason=answer.finish_reason,
        stop_token_id=answer.stop_token_id,
        num_cached_tokens=group.num_cached_tokens if index == 0 else 0,
        num_recomputed_tokens=group.num_recomputed_tokens if index == 0 else 0,
    )


def _logprobs(path: _ScoredPath | None) -> tuple[TokenLogprobs, ...]:
    scores = []
    while path is not None:
        scores.append(path.last)
        path = path.before
    return tuple(reversed(scores))


def _shortage(params: SamplingParams, num_answers: int) -> SequenceFailure:
    """Fewer answers exist than are wanted: the request forbids all other tokens, or the vocabulary has no more."""
    forbids = {
        "allowed_token_ids": bool(params.allowed_token_ids),
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens > 0,
    }
    param = next((name for name, forbidding in forbids.items() if forbidding), "n")
    found = {0: "no answer", 1: "one answer"}.get(num_answers, f"{num_answers} answers")
    return SequenceFailure(
        f"The beam search found {found}, and n is {params.n}: no other is possible under {param}.", param
    )
