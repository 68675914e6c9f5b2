"""Tells what happened to a request: from the engine's report to the answer of `GET /v1/requests/{id}`, with sentences.

Pure functions. Hides what belongs to other keys; knows neither HTTP nor where the reports come from.
"""

from collections.abc import Mapping

from scheduler.request_report import Preemption, PreemptionCause, RequestReport, SequenceReport, WaitReason
from server.api_keys import ADMIN
from server.protocol.request_reports import PreemptionDetails, PromptDetails, RequestDetails, SequenceDetails
from server.request_history import RequestTrace

MAX_SHOWN_PROMPTS = 64
_WAITS: Mapping[WaitReason, str] = {
    "grammar": "while its grammar was compiled",
    "behind_others": "behind other requests",
    "max_num_seqs": "for one of the --max-num-seqs places in a step",
    "kv_blocks": "for KV blocks",
    "token_budget": "for room in the --max-num-batched-tokens of a step",
    "preempted": "to go on after it was preempted",
}
_CAUSES: Mapping[PreemptionCause, str] = {
    "kv_blocks": "KV blocks ran out",
    "max_num_seqs": "beams of one search took turns at the --max-num-seqs places",
    "priority": "a request of a better priority came",
    "fair_share": "another key has had less than its share",
}
_DROPS = {
    "queue_full": "the queue was full",
    "queue_timeout": "it waited longer than it may",
    "deadline": "its answer could not be complete in time",
}


def tell(
    trace: RequestTrace, live: Mapping[str, RequestReport], asker: str | None, block_size: int | None = None
) -> RequestDetails:
    """The whole story, as `asker` may see it.

    Args:
        trace: of the request.
        live: reports of prompts that have not ended, by engine id.
        asker: the name of the key that is asked with.
        block_size: tokens of the blocks in the reports' tables.
    """
    prompts = []
    for position, engine_id in enumerate(trace.engine_ids()):
        if position >= MAX_SHOWN_PROMPTS:
            break
        report = trace.reports.get(engine_id) or live.get(engine_id)
        prompts.append(_prompt(position, report, trace, asker))
    return RequestDetails(
        id=trace.answer_id,
        request_id=trace.request_id,
        model=trace.model,
        endpoint=trace.endpoint,
        key=trace.key_name,
        created=trace.created,
        ended=trace.ended,
        status=trace.status,
        finish_reasons=dict(trace.finish_reasons),
        num_prompts=trace.num_prompts,
        prompts=prompts,
        block_size=block_size,
    )


def explain(report: RequestReport) -> list[str]:
    """What happened to one prompt, in sentences."""
    sentences = [_waiting(report)]
    if report.admitted_time is not None:
        sentences.append(f"It first ran {report.queue_seconds:.3f} s after it was queued.")
        sentences.append(_cached(report))
    if report.num_preemptions:
        sentences.append(_preempted(report))
    if report.drop_cause is not None:
        sentences.append(f"It was dropped: {_DROPS[report.drop_cause]}.")
    return sentences


def _waiting(report: RequestReport) -> str:
    waits = sorted(report.wait_seconds.items(), key=lambda item: -item[1])
    told = ", ".join(f"{seconds:.3f} s {_WAITS[reason]}" for reason, seconds in waits if seconds >= 0.0005)
    waited = f"It has waited {told}." if told else "It has not waited."
    if report.wait_reason is None:
        return waited
    return f"{waited} It waits at this moment, {_WAITS[report.wait_reason]}."


def _cached(report: RequestReport) -> str:
    found = f"{report.num_cached_tokens} of its {report.num_prompt_tokens} prompt tokens were cached"
    if report.first_difference is None:
        return f"{found}."
    return f"{found}; token {report.first_difference} is the first that differs from what was."


def _preempted(report: RequestReport) -> str:
    times = "once" if report.num_preemptions == 1 else f"{report.num_preemptions} times"
    causes = " and ".join(_CAUSES[cause] for cause in dict.fromkeys(p.cause for p in report.preemptions))
    num_swapped = sum(p.is_swapped for p in report.preemptions)
    kept = f"; {num_swapped} of these times its KV blocks were kept in host memory" if num_swapped else ""
    return (
        f"It was preempted {times}, because {causes}{kept}. "
        f"{report.num_recomputed_tokens} of its tokens were computed again."
    )


def _prompt(position: int, report: RequestReport | None, trace: RequestTrace, asker: str | None) -> PromptDetails:
    if report is None:
        is_over = trace.status is not None
        ended = "The engine did not take it, or was lost while it had it."
        return PromptDetails(position, None, [ended if is_over else "The engine has not got it yet."])
    return PromptDetails(
        index=position,
        state=report.state,
        explanation=explain(report),
        priority=report.priority,
        wait_reason=report.wait_reason,
        wait_seconds=report.wait_seconds,
        queue_seconds=report.queue_seconds,
        prefill_seconds=report.prefill_seconds,
        decode_seconds=report.decode_seconds,
        admitted_at=report.admitted_time,
        first_token_at=report.first_token_time,
        ended_at=report.ended_time,
        num_prompt_tokens=report.num_prompt_tokens,
        num_cached_tokens=report.num_cached_tokens,
        first_difference=report.first_difference,
        num_generated_tokens=report.num_generated_tokens,
        num_recomputed_tokens=report.num_recomputed_tokens,
        num_preemptions=report.num_preemptions,
        preemptions=[_preemption(preemption, report.tenant, asker) for preemption in report.preemptions],
        sequences=[_sequence(sequence) for sequence in report.sequences],
        drop_cause=report.drop_cause,
    )


def _preemption(preemption: Preemption, tenant: str, asker: str | None) -> PreemptionDetails:
    is_shown = preemption.by_tenant == tenant or asker == ADMIN
    return PreemptionDetails(
        time=preemption.time,
        index=preemption.index,
        cause=preemption.cause,
        by=preemption.by_request_id.rpartition("-")[0] if is_shown else None,
        num_lost_tokens=preemption.num_lost_tokens,
        swapped=preemption.is_swapped,
    )


def _sequence(sequence: SequenceReport) -> SequenceDetails:
    return SequenceDetails(
        index=sequence.index,
        state=sequence.state,
        finish_reason=sequence.finish_reason,
        num_tokens=sequence.num_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_recomputed_tokens=sequence.num_recomputed_tokens,
        num_blocks=sequence.num_blocks,
        block_table=list(sequence.block_ids),
        num_swapped_blocks=sequence.num_host_blocks,
    )
