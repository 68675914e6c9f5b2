"""OpenAI's `POST /v1/responses`, without its store, and `POST /v1/responses/input_tokens`."""

import itertools
import time
from typing import Any, Literal

from fastapi import APIRouter, Request
from msgspec.structs import replace
from starlette.responses import Response as HttpResponse

from server.chat_output import ChatOutput
from server.disconnect import until_disconnect
from server.edge import CurrentEdge, key_name_of
from server.engine_errors import RequestRejected
from server.errors import ApiError, InvalidRequest
from server.generation import ChoiceDelta, ChoiceResult, TokenCounts
from server.protocol.response_objects import (
    FunctionCallArgumentsDelta,
    IncompleteDetails,
    InputTokenCount,
    InputTokensDetails,
    OutputTextDelta,
    OutputTokensDetails,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseUsage,
    StreamEvent,
)
from server.protocol.responses import to_json
from server.protocol.responses_api import InputTokensRequest, Part, ResponsesRequest
from server.response_items import ResponseItems
from server.responses_preparation import PreparedResponse, count_input_tokens, prepare_response
from server.routes.generating import Head, Route, answer, chunk_event, ignored_fields_header, read_body
from server.routes.openapi import body_of

router = APIRouter(tags=["generation"])

_ENGINE_FIELDS = {"max_tokens": "max_output_tokens", "prompt": "input"}


class ResponseWriter:
    """Writes one answer, whole or as events."""

    def __init__(self, request: PreparedResponse, head: Head) -> None:
        """For the answer to `request`."""
        self._obfuscates = request.include_obfuscation
        self._numbers = itertools.count()
        self._items = ResponseItems(ChatOutput(request), self._numbers)
        self._begun = _begun_response(request.asked, head)
        self._has_begun = False
        self._is_complete = False

    def whole(self, results: list[ChoiceResult], counts: TokenCounts) -> Response:
        """The answer at once."""
        (result,) = results
        self._take(ChoiceDelta(0, result.text, tuple(result.tokens), tuple(result.token_ids), result.finish_reason))
        return self._ended(counts)

    def delta(self, delta: ChoiceDelta, counts: TokenCounts) -> list[bytes]:
        """The next piece."""
        events: list[StreamEvent] = []
        if not self._has_begun:
            self._has_begun = True
            events.append(ResponseCreated(next(self._numbers), self._begun))
            events.append(ResponseInProgress(next(self._numbers), self._begun))
        return [self._encoded(event) for event in events + self._take(delta)]

    def end(self, counts: TokenCounts) -> list[bytes]:
        """The whole of what came."""
        last = ResponseCompleted if self._is_complete else ResponseIncomplete
        return [self._encoded(last(next(self._numbers), self._ended(counts)))]

    def failed(self, error: ApiError) -> list[bytes]:
        """The error in place of the end, with what is complete."""
        is_ours = not isinstance(error, InvalidRequest)
        cause = ResponseError(error.message, "server_error" if is_ours else "invalid_prompt")
        response = replace(self._begun, status="failed", error=cause, output=list(self._items.items))
        return [self._encoded(ResponseFailed(next(self._numbers), response))]

    def _take(self, delta: ChoiceDelta) -> list[StreamEvent]:
        if delta.finish_reason is not None:
            self._is_complete = delta.finish_reason == "stop"
        return self._items.push(delta)

    def _ended(self, counts: TokenCounts) -> Response:
        status: Literal["completed", "incomplete"] = "completed" if self._is_complete else "incomplete"
        return replace(
            self._begun,
            status=status,
            output=self._items.items,
            usage=_usage(counts),
            completed_at=int(time.time()) if self._is_complete else None,
            incomplete_details=None if self._is_complete else IncompleteDetails(),
        )

    def _encoded(self, event: StreamEvent) -> bytes:
        is_delta = isinstance(event, OutputTextDelta | FunctionCallArgumentsDelta)
        name = str(event.__struct_config__.tag)
        return chunk_event(event, name, obfuscate=self._obfuscates and is_delta)


def _begun_response(asked: ResponsesRequest, head: Head) -> Response:
    """What was asked, with the defaults that were taken."""
    form = asked.text and asked.text.format
    reasoning = asked.reasoning
    return Response(
        id=head.id,
        created_at=head.created,
        model=head.model,
        status="in_progress",
        output=[],
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        max_tool_calls=asked.max_tool_calls,
        metadata=asked.metadata or {},
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        prompt_cache_key=asked.prompt_cache_key,
        reasoning={"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        safety_identifier=asked.safety_identifier,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        text={
            "format": {"type": "text"} if form is None else _given(form),
            "verbosity": (asked.text and asked.text.verbosity) or "medium",
        },
        tool_choice=_tool_choice(asked),
        tools=[{"strict": None, "parameters": None, **_given(tool)} for tool in asked.tools or []],
        top_logprobs=asked.top_logprobs or 0,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        user=asked.user,
    )


def _tool_choice(asked: ResponsesRequest) -> str | dict[str, Any]:
    choice = asked.tool_choice
    if choice is None:
        return "auto"
    return _given(choice) if choice.type in ("function", "allowed_tools") else choice.type


def _given(part: Part) -> dict[str, Any]:
    """The fields of a part that are set."""
    return part.model_dump(by_alias=True, exclude_none=True)


def _usage(counts: TokenCounts) -> ResponseUsage:
    num_input, num_output = counts.num_prompt_tokens, counts.num_completion_tokens
    return ResponseUsage(
        num_input,
        InputTokensDetails(counts.num_cached_tokens),
        num_output,
        OutputTokensDetails(),
        num_input + num_output,
    )


ROUTE = Route("resp_", prepare_response, ResponseWriter)


@router.post("/v1/responses", openapi_extra=body_of(ResponsesRequest))
async def create_response(request: Request, edge: CurrentEdge) -> HttpResponse:
    """Continue a conversation, which comes whole: nothing is stored."""
    try:
        return await answer(request, edge, ROUTE)
    except RequestRejected as rejected:  # the engine knows the older names of the fields
        message = str(rejected).replace("max_tokens", "max_output_tokens")
        raise InvalidRequest(message, _ENGINE_FIELDS.get(rejected.param, rejected.param)) from None


@router.post("/v1/responses/input_tokens", openapi_extra=body_of(InputTokensRequest))
async def count_response_tokens(request: Request, edge: CurrentEdge) -> HttpResponse:
    """Count the tokens of the prompt that a conversation makes."""
    body = await read_body(request, edge.settings.max_body_size)
    counting = edge.preparer.run(count_input_tokens, body, edge.served_model(), key_name_of(request))
    counted = await until_disconnect(request.receive, counting)
    headers = ignored_fields_header(counted.ignored_fields)
    content = to_json(InputTokenCount(counted.num_tokens))
    return HttpResponse(content, headers=dict(headers), media_type="application/json")
