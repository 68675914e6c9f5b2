"""Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.chat_output import ChatOutput
from server.disconnect import until_disconnect
from server.edge import CurrentEdge, key_name_of
from server.errors import ApiError
from server.event_stream import server_sent_event
from server.generation import ChoiceDelta, ChoiceResult, TokenCounts
from server.message_blocks import MessageBlocks
from server.messages_preparation import PreparedMessage, count_message_tokens, prepare_message
from server.protocol.messages_answers import (
    MESSAGES_PATH,
    ContentBlock,
    Message,
    MessageChanges,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopReason,
    TokenCount,
    error_body,
)
from server.protocol.messages_api import CountTokensRequest, MessagesRequest
from server.protocol.responses import to_json
from server.routes.generating import Head, Route, answer, ignored_fields_header, read_body
from server.routes.openapi import body_of

router = APIRouter(tags=["generation"])


class MessageWriter:
    """Writes one answer, whole or as events."""

    def __init__(self, request: PreparedMessage, head: Head) -> None:
        """For the answer to `request`."""
        self._head = head
        self._blocks = MessageBlocks(ChatOutput(request))
        self._has_begun = False
        self._end: tuple[StopReason, str | None] | None = None
        self._is_cut_by_window = request.prompts[0].params.max_tokens < request.wanted_tokens

    def whole(self, results: list[ChoiceResult], counts: TokenCounts) -> Message:
        """The answer at once."""
        (result,) = results
        delta = ChoiceDelta(
            0, result.text, (), tuple(result.token_ids), result.finish_reason, stop_string=result.stop_string
        )
        self._take(delta)
        return self._message(self._blocks.content, counts)

    def delta(self, delta: ChoiceDelta, counts: TokenCounts) -> list[bytes]:
        """The next piece."""
        events: list[MessageEvent] = []
        if not self._has_begun:
            self._has_begun = True
            events.append(MessageStart(self._message([], counts)))
        events += self._take(delta)
        return [_encoded(event) for event in events]

    def end(self, counts: TokenCounts) -> list[bytes]:
        """Why it ended, and the counts."""
        assert self._end is not None, "the answer has not ended"
        delta = MessageDelta(MessageChanges(*self._end), _usage(counts))
        return [_encoded(delta), _encoded(MessageStop())]

    def failed(self, error: ApiError) -> list[bytes]:
        """The error in place of the end."""
        return [server_sent_event(to_json(error_body(error)), "error")]

    def _take(self, delta: ChoiceDelta) -> list[MessageEvent]:
        events = self._blocks.push(delta)
        if delta.finish_reason is not None:
            self._end = (self._stop_reason(delta), delta.stop_string)
        return events

    def _stop_reason(self, delta: ChoiceDelta) -> StopReason:
        if delta.finish_reason == "length":
            return "model_context_window_exceeded" if self._is_cut_by_window else "max_tokens"
        if delta.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.wants_tools else "end_turn"

    def _message(self, content: list[ContentBlock], counts: TokenCounts) -> Message:
        usage = _usage(counts, service_tier="standard")
        stop_reason, stop_sequence = self._end or (None, None)
        return Message(self._head.id, self._head.model, content, stop_reason, stop_sequence, usage)


def _usage(counts: TokenCounts, **more: Any) -> MessageUsage:  # noqa: ANN401
    num_cached = counts.num_cached_tokens
    return MessageUsage(counts.num_prompt_tokens - num_cached, counts.num_completion_tokens, num_cached, **more)


def _encoded(event: MessageEvent) -> bytes:
    return server_sent_event(to_json(event), str(event.__struct_config__.tag))


ROUTE = Route("msg_", prepare_message, MessageWriter)


@router.post(MESSAGES_PATH, openapi_extra=body_of(MessagesRequest))
async def create_message(request: Request, edge: CurrentEdge) -> Response:
    """Continue a conversation, as Anthropic's API does."""
    return await answer(request, edge, ROUTE)


@router.post(f"{MESSAGES_PATH}/count_tokens", openapi_extra=body_of(CountTokensRequest))
async def count_tokens(request: Request, edge: CurrentEdge) -> Response:
    """Count the tokens of the prompt that a conversation makes."""
    body = await read_body(request, edge.settings.max_body_size)
    counting = edge.preparer.run(count_message_tokens, body, edge.served_model(), key_name_of(request))
    counted = await until_disconnect(request.receive, counting)
    headers = ignored_fields_header(counted.ignored_fields)
    return Response(to_json(TokenCount(counted.num_tokens)), headers=dict(headers), media_type="application/json")
