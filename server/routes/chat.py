"""`POST /v1/chat/completions`."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from server.chat_output import ChatEvent, ChatOutput, ContentDelta, ToolCallArguments, ToolCallBegin
from server.chat_preparation import prepare_chat
from server.edge import CurrentEdge
from server.errors import ApiError
from server.event_stream import server_sent_event
from server.generation import ChoiceDelta, ChoiceResult, TokenCounts
from server.preparation import PreparedRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatFunction,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    Usage,
    to_json,
    to_raw,
)
from server.protocol.shaping import (
    chat_logprobs,
    chunk_usage,
    prompt_logprobs,
    stop_reason,
    timings,
    usage,
)
from server.routes.direct_route import DirectRoute
from server.routes.generating import DONE, PLACEHOLDER, Head, Route, TextChunks, answer, chunk_event, has_plain_chunks
from server.routes.openapi import body_of
from server.scored_tokens import ScoredToken

router = APIRouter(tags=["generation"], route_class=DirectRoute)


class ChatWriter:
    """A stream's chunks carry pieces of the message; the first of a choice also says who speaks."""

    def __init__(self, request: PreparedRequest, head: Head) -> None:
        """For the answer to `request`."""
        self._request = request
        self._head = head
        self._output = ChatOutput(request)
        self._begun: set[int] = set()  # choices
        self._is_plain = has_plain_chunks(request) and request.answer_form.tool_format is None
        self._text_chunks: dict[int, TextChunks] = {}  # of choices that have begun

    def whole(self, results: list[ChoiceResult], counts: TokenCounts) -> ChatCompletion:
        """All choices at once."""
        choices = [to_raw(self._choice(index, result)) for index, result in enumerate(results)]
        head = self._head
        scored = self._request.prompt_logprobs is not None
        return ChatCompletion(
            head.id,
            head.created,
            head.model,
            choices,
            usage(counts),
            system_fingerprint=head.system_fingerprint,
            timings=timings(self._request, counts),
            prompt_logprobs=prompt_logprobs(results[0].prompt_tokens) if scored else UNSET,
            prompt_token_ids=self._prompt_token_ids(),
        )

    def _choice(self, index: int, result: ChoiceResult) -> ChatChoice:
        chat_answer = self._output.whole(result)
        calls = [
            ChatToolCall(ChatFunction(call.arguments, call.name), id=call.call_id, type="function")
            for call in chat_answer.tool_calls
        ]
        return ChatChoice(
            index,
            ChatMessage("assistant", chat_answer.content, None, calls or UNSET),
            self._logprobs(result.tokens),
            chat_answer.finish_reason,
            stop_reason=stop_reason(result),
            token_ids=self._token_ids(result.token_ids),
        )

    def delta(self, delta: ChoiceDelta, counts: TokenCounts) -> list[bytes]:
        """The next piece of one choice: none while the text may still become a tool call."""
        first = delta.index not in self._begun
        if self._is_plain and not first and delta.finish_reason is None and delta.text:
            chunks = self._text_chunks.get(delta.index)
            if chunks is None:
                chunks = self._text_chunks[delta.index] = self._text_chunks_of(delta.index, counts)
            return [chunks.event(delta.text)]
        events = self._output.push(delta)
        if not (first or events or delta.tokens or delta.finish_reason or self._request.return_token_ids):
            return []
        self._begun.add(delta.index)
        choice = ChatChunkChoice(
            delta.index,
            self._message(events, first=first),
            self._logprobs(delta.tokens),
            self._output.finish_reason(delta),
            stop_reason=UNSET if delta.finish_reason is None else stop_reason(delta),
            token_ids=self._token_ids(delta.token_ids),
        )
        counted = chunk_usage(self._request, counts)
        return [self._chunk([choice], counted, counts, self._prompt_token_ids() if first else UNSET)]

    def _text_chunks_of(self, index: int, counts: TokenCounts) -> TextChunks:
        choice = ChatChunkChoice(index, ChatMessage(content=PLACEHOLDER), None, None)
        return TextChunks(self._chunk([choice], chunk_usage(self._request, counts), counts))

    def _message(self, events: Sequence[ChatEvent], *, first: bool) -> ChatMessage:
        """What a delta shows. The first one names the speaker, and says at once that there may be no content."""
        nothing = None if self._request.answer_form.tool_format is not None else ""
        content = "".join(event.text for event in events if isinstance(event, ContentDelta))
        calls = _tool_call_pieces(events)
        return ChatMessage(
            "assistant" if first else UNSET, content or (nothing if first else UNSET), tool_calls=calls or UNSET
        )

    def end(self, counts: TokenCounts) -> list[bytes]:
        """The counts, where they are wanted, and the end."""
        return [*([self._chunk([], usage(counts), counts)] if self._request.include_usage else []), DONE]

    def failed(self, error: ApiError) -> list[bytes]:
        """The error in place of the end."""
        return [server_sent_event(to_json(error.body()))]

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        counted: Usage | UnsetType | None,
        counts: TokenCounts,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        head = self._head
        chunk = ChatCompletionChunk(
            head.id,
            head.created,
            head.model,
            choices,
            system_fingerprint=head.system_fingerprint,
            usage=counted,
            timings=timings(self._request, counts),
            prompt_token_ids=prompt_token_ids,
        )
        return chunk_event(chunk, obfuscate=self._request.include_obfuscation)

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> ChatLogprobs | None:
        return None if self._request.logprobs is None else chat_logprobs(tokens)

    def _token_ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return list(token_ids) if self._request.return_token_ids else UNSET

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self._request.prompts[0].token_ids) if self._request.return_token_ids else UNSET


def _tool_call_pieces(events: Sequence[ChatEvent]) -> list[ChatToolCall]:
    """One piece for each call: its beginning and its arguments, as far as they came."""
    begun = {event.position: event for event in events if isinstance(event, ToolCallBegin)}
    arguments: dict[int, str] = dict.fromkeys(begun, "")
    for event in events:
        if isinstance(event, ToolCallArguments):
            arguments[event.position] = arguments.get(event.position, "") + event.text
    return [
        ChatToolCall(ChatFunction(text, begun[position].name), position, begun[position].call_id, "function")
        if position in begun
        else ChatToolCall(ChatFunction(text), position)
        for position, text in arguments.items()
    ]


ROUTE = Route("chatcmpl-", prepare_chat, ChatWriter)


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatCompletionRequest))
async def create_chat_completion(request: Request, edge: CurrentEdge) -> Response:
    """Continue a conversation."""
    return await answer(request, edge, ROUTE)
