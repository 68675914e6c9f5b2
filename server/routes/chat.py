"""`POST /v1/chat/completions`."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from server.edge import CurrentEdge
from server.generation import ChoiceDelta, ChoiceResult
from server.preparation import PreparedRequest, prepare_chat
from server.protocol.chat import ChatCompletionRequest
from server.protocol.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    Usage,
    to_raw,
)
from server.protocol.shaping import chat_logprobs, finish_reason
from server.routes.generating import Head, answer
from server.routes.openapi import body_of
from server.scored_tokens import ScoredToken

router = APIRouter(tags=["generation"])


class ChatShape:
    """A stream's chunks carry pieces of the message; the first of a choice also says who speaks."""

    id_prefix = "chatcmpl-"

    def whole(self, request: PreparedRequest, results: list[ChoiceResult], head: Head, counts: Usage) -> ChatCompletion:
        """All choices at once."""
        choices = [
            to_raw(
                ChatChoice(
                    index,
                    ChatMessage("assistant", result.text, None),
                    _logprobs(request, result.tokens),
                    finish_reason(result.finish_reason),
                    _token_ids(request, result.token_ids),
                )
            )
            for index, result in enumerate(results)
        ]
        return ChatCompletion(
            head.id, head.created, head.model, choices, counts, prompt_token_ids=_prompt_token_ids(request)
        )

    def chunk(self, request: PreparedRequest, delta: ChoiceDelta, head: Head, *, first: bool) -> ChatCompletionChunk:
        """The next piece of one choice."""
        choice = ChatChunkChoice(
            delta.index,
            ChatMessage("assistant" if first else UNSET, delta.text if delta.text or first else UNSET),
            _logprobs(request, delta.tokens),
            finish_reason(delta.finish_reason),
            _token_ids(request, delta.token_ids),
        )
        return ChatCompletionChunk(
            head.id,
            head.created,
            head.model,
            [choice],
            usage=None if request.include_usage else UNSET,
            prompt_token_ids=_prompt_token_ids(request) if first else UNSET,
        )

    def usage_chunk(self, head: Head, counts: Usage) -> ChatCompletionChunk:
        """No choices, only the counts."""
        return ChatCompletionChunk(head.id, head.created, head.model, [], usage=counts)


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatCompletionRequest))
async def create_chat_completion(request: Request, edge: CurrentEdge) -> Response:
    """Continue a conversation."""
    return await answer(request, edge, prepare_chat, ChatShape())


def _logprobs(request: PreparedRequest, tokens: Sequence[ScoredToken]) -> ChatLogprobs | None:
    return None if request.logprobs is None else chat_logprobs(tokens)


def _token_ids(request: PreparedRequest, token_ids: Sequence[int]) -> list[int] | UnsetType:
    return list(token_ids) if request.return_token_ids else UNSET


def _prompt_token_ids(request: PreparedRequest) -> list[int] | UnsetType:
    return list(request.prompts[0].token_ids) if request.return_token_ids else UNSET
