"""What a step's result means for one sequence: sampled tokens, the checks that end it, and scores of its prompt.

Changes the sequence's tokens, its place in its grammar and its request's count of scores; never queues or blocks.
"""

from collections.abc import Collection
from typing import NamedTuple

from scheduler.output import (
    FinishReason,
    KnownRow,
    NewRow,
    RowResult,
    SequenceFailure,
    SequenceUpdate,
    TokenLogprobs,
)
from scheduler.request import Sequence


class AcceptedTokens(NamedTuple):
    """The sampled tokens that count, and whether the last of them ended the sequence."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    failure: SequenceFailure | None = None


NOTHING_ACCEPTED = AcceptedTokens()


def accept_tokens(sequence: Sequence, token_ids: tuple[int, ...], eos_token_ids: Collection[int]) -> AcceptedTokens:
    """Append sampled tokens up to the first that ends the sequence; if there is none at all, nothing may follow it."""
    params = sequence.request.params
    if params.max_tokens == 0:
        return AcceptedTokens((), "length" if params.pooling is None else "stop")
    if not token_ids:
        return AcceptedTokens((), "error", failure=_failure(sequence))
    num_generated = sequence.num_generated_tokens
    for position, token_id in enumerate(token_ids):
        sequence.token_ids.append(token_id)
        num_generated += 1
        is_end = token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)
        if is_end and num_generated > params.min_tokens:
            return AcceptedTokens(token_ids[: position + 1], "stop", token_id)
        grammar = sequence.grammar
        if grammar is not None:
            if token_id in eos_token_ids and grammar.may_end:  # nothing else could follow, so that it was let in
                return AcceptedTokens(token_ids[: position + 1], "stop", token_id)
            if not grammar.accept(token_id):
                return AcceptedTokens(token_ids[: position + 1], "error", failure=_failure(sequence))
            if grammar.is_complete:
                return AcceptedTokens(token_ids[: position + 1], "stop")
        if num_generated >= params.max_tokens:
            return AcceptedTokens(token_ids[: position + 1], "length")
    return AcceptedTokens(token_ids)


def unreported_scores(sequence: Sequence, row: NewRow | KnownRow, result: RowResult) -> tuple[TokenLogprobs, ...]:
    """Prompt scores not reported yet, which now count as reported: a recomputed sequence scores its prompt again."""
    request = sequence.request
    if sequence.index != 0:
        return ()
    last = min(row.end, sequence.num_prompt_tokens - 1)  # token 0 has no score
    num_unreported = max(0, last - request.num_scored_tokens)
    request.num_scored_tokens += num_unreported
    return result.prompt_logprobs[len(result.prompt_logprobs) - num_unreported :]


def build_update(
    sequence: Sequence, accepted: AcceptedTokens, result: RowResult, scores: tuple[TokenLogprobs, ...]
) -> SequenceUpdate | None:
    """What the edge is to hear of a sequence after a step, if anything."""
    if not (accepted.token_ids or accepted.finish_reason or scores):
        return None
    return SequenceUpdate(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=accepted.token_ids,
        logprobs=result.logprobs[: len(accepted.token_ids)],
        prompt_logprobs=scores,
        finish_reason=accepted.finish_reason,
        stop_token_id=accepted.stop_token_id,
        embedding=result.embedding,
        num_cached_tokens=sequence.num_cached_tokens,
        num_recomputed_tokens=sequence.num_recomputed_tokens,
        failure=accepted.failure,
    )


def _failure(sequence: Sequence) -> SequenceFailure:
    """Why a sequence cannot go on, whose grammar has failed or which no token may follow."""
    grammar, wanted = sequence.grammar, sequence.request.params.structured_output
    num_tokens = sequence.num_generated_tokens
    place = f"After {num_tokens} {'token' if num_tokens == 1 else 'tokens'} of the answer"
    if grammar is not None and wanted is not None and grammar.error is not None:
        if grammar.is_too_costly:
            message = f"{place}, {wanted.param} cannot be followed any further, for it takes too much: {grammar.error}."
            return SequenceFailure(message, wanted.param)
        return SequenceFailure(f"{place} its grammar failed: {grammar.error}.")
    params = _forbidding_params(sequence)
    if not params:
        return SequenceFailure(f"{place} no token was left, though the request forbids none.")
    together = " together" if len(params) > 1 else ""
    return SequenceFailure(f"{place}, no token is allowed by {' and '.join(params)}{together}.", params[0])


def _forbidding_params(sequence: Sequence) -> list[str]:
    """The fields of a request that forbid tokens, those that its answer must not end with yet included."""
    params = sequence.request.params
    wanted = params.structured_output
    fields = {
        "structured_outputs" if wanted is None else wanted.param: wanted is not None,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "min_tokens": sequence.num_generated_tokens < params.min_tokens,
    }
    return [name for name, forbids in fields.items() if forbids]
