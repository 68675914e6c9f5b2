"""What the spans of a request say: names and values, from what the edge and the engine know of it. Pure functions.

Names are OpenTelemetry's for HTTP and for generative AI, those that vLLM adds to them, and ours (octavo.*). Prompts,
answers, stop strings and keys are in none of them. Knows no SDK.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from starlette.types import Scope

from scheduler.request_report import Preemption, RequestReport
from scheduler.sampling_params import SamplingParams
from server.http_metrics import METHODS
from server.preparation import PreparedRequest
from server.request_history import RequestTrace

AttributeValue = str | bool | int | float | list[str]
Attributes = Mapping[str, AttributeValue]

MAX_PROMPTS = 64  # of one request, that get spans of their own
_MAX_TEXT = 256  # characters of what a client sent
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a phase, at a time in seconds since the epoch."""

    name: str
    time: float
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of what the engine did for one prompt. Times in seconds since the epoch."""

    name: str  # queue, prefill or decode
    began: float
    ended: float
    attributes: Attributes
    events: list[Event] = field(default_factory=list)


def http_attributes(scope: Scope) -> Attributes:
    """What is known of an HTTP request before it is read."""
    method = scope["method"]
    attributes: dict[str, AttributeValue] = {
        "http.request.method": method if method in METHODS else "_OTHER",
        "url.scheme": scope.get("scheme", "http"),
        "url.path": scope["path"][:_MAX_TEXT],
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    if method not in METHODS:
        attributes["http.request.method_original"] = method[:_MAX_TEXT]
    for name, address in (("server", scope.get("server")), ("client", scope.get("client"))):
        if address:
            attributes[f"{name}.address"] = address[0]
            if address[1] is not None:
                attributes[f"{name}.port"] = address[1]
    agent = next((value for header, value in scope["headers"] if header == b"user-agent"), None)
    if agent is not None:
        attributes["user_agent.original"] = agent.decode("latin-1")[:_MAX_TEXT]
    return attributes


def generation_attributes(request: PreparedRequest) -> Attributes:
    """What a request for text asks for, defaults included. Of several prompts, the first one's."""
    params = request.prompts[0].params
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.stream": request.stream,
        "gen_ai.request.n": request.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        **_sampling(params),
    }
    if request.n != 1:
        attributes["gen_ai.request.choice.count"] = request.n
    if params.structured_output is not None:
        is_json = params.structured_output.kind.startswith("json")
        attributes["gen_ai.output.type"] = "json" if is_json else "text"
        attributes["octavo.structured_output"] = params.structured_output.kind
    return attributes


def _sampling(params: SamplingParams) -> Attributes:
    if params.beam_search is not None:
        return {"octavo.beam_width": params.beam_search.width}
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
    }
    if params.top_k:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.presence_penalty:
        attributes["gen_ai.request.presence_penalty"] = params.presence_penalty
    if params.frequency_penalty:
        attributes["gen_ai.request.frequency_penalty"] = params.frequency_penalty
    return attributes


def answer_attributes(trace: RequestTrace) -> Attributes:
    """What became of a request for an answer: tokens of all its prompts, and the longest of their times."""
    reports = list(trace.reports.values())
    num_prompt_tokens = sum(report.num_prompt_tokens for report in reports)
    num_generated_tokens = sum(report.num_generated_tokens for report in reports)
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _OPERATIONS.get(trace.endpoint, "text_completion"),
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": trace.answer_id,
        "gen_ai.response.finish_reasons": list(trace.finish_reasons),
        "gen_ai.request.id": trace.request_id,
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": sum(report.num_cached_tokens for report in reports),
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        "gen_ai.usage.completion_tokens": num_generated_tokens,
        "gen_ai.usage.num_sequences": trace.finish_reasons.total(),
        "octavo.num_prompts": trace.num_prompts,
        "octavo.num_preemptions": sum(report.num_preemptions for report in reports),
        "octavo.recomputed_tokens": sum(report.num_recomputed_tokens for report in reports),
        **_latencies(reports),
    }
    if trace.key_name is not None:
        attributes["octavo.key"] = trace.key_name
    causes = sorted({report.drop_cause for report in reports if report.drop_cause is not None})
    if causes:
        attributes["octavo.drop_causes"] = [str(cause) for cause in causes]
    return attributes


def _latencies(reports: list[RequestReport]) -> Attributes:
    """Seconds, by vLLM's names; one that no prompt has is left out."""
    seconds: dict[str, Iterable[float | None]] = {
        "gen_ai.latency.time_in_queue": (report.queue_seconds for report in reports),
        "gen_ai.latency.time_to_first_token": (
            None if report.first_token_time is None else report.first_token_time - report.arrival_time
            for report in reports
        ),
        "gen_ai.latency.e2e": (
            None if report.ended_time is None else report.ended_time - report.arrival_time for report in reports
        ),
        "gen_ai.latency.time_in_model_prefill": (report.prefill_seconds for report in reports),
        "gen_ai.latency.time_in_model_decode": (report.decode_seconds for report in reports),
        "gen_ai.latency.time_in_model_inference": (report.inference_seconds for report in reports),
    }
    longest = {name: max((s for s in values if s is not None), default=None) for name, values in seconds.items()}
    return {name: value for name, value in longest.items() if value is not None}


def phases_of(report: RequestReport) -> list[Phase]:
    """One after the other, without gaps: in the queue, from there to the first token, and from that to the end.

    The last one that was reached lasts to the end, such as the prefill of an embedding or of what was given up.
    """
    reached = [
        (name, time)
        for name, time in (
            ("queue", report.queued_time),
            ("prefill", report.admitted_time),
            ("decode", report.first_token_time),
        )
        if time is not None
    ]
    end = report.report_time if report.ended_time is None else report.ended_time
    ends = [*(time for _, time in reached[1:]), end]
    events = [_preempted(preemption) for preemption in report.preemptions]
    phases = []
    for (name, began), ended in zip(reached, ends, strict=True):
        is_last = name == reached[-1][0]
        own = [event for event in events if began <= event.time and (is_last or event.time < ended)]
        phases.append(Phase(name, began, max(began, ended), _of_phase(name, report), own))
    return phases


def _of_phase(name: str, report: RequestReport) -> Attributes:
    match name:
        case "queue":
            waits = {reason: seconds for reason, seconds in report.wait_seconds.items() if reason != "preempted"}
            return {
                "octavo.priority": report.priority,
                **{f"octavo.wait_seconds.{reason}": seconds for reason, seconds in waits.items()},
            }
        case "prefill":
            return {
                "octavo.prompt_tokens": report.num_prompt_tokens,
                "octavo.cached_tokens": report.num_cached_tokens,
            }
        case _:
            return {
                "octavo.generated_tokens": report.num_generated_tokens,
                "octavo.num_preemptions": report.num_preemptions,
                "octavo.recomputed_tokens": report.num_recomputed_tokens,
                "octavo.wait_seconds.preempted": report.wait_seconds.get("preempted", 0.0),
            }


def _preempted(preemption: Preemption) -> Event:
    attributes: Attributes = {
        "octavo.cause": preemption.cause,
        "octavo.sequence": preemption.index,
        "octavo.lost_tokens": preemption.num_lost_tokens,
        "octavo.is_swapped": preemption.is_swapped,
    }
    return Event("preempted", preemption.time, attributes)
