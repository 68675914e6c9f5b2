"""`POST /v1/completions`."""

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from server.edge import CurrentEdge
from server.errors import ApiError
from server.event_stream import server_sent_event
from server.generation import ChoiceDelta, ChoiceResult, TokenCounts
from server.preparation import PreparedRequest, prepare_completion
from server.protocol.completions import CompletionRequest
from server.protocol.responses import Completion, CompletionChoice, Usage, to_json, to_raw
from server.protocol.shaping import completion_logprobs, finish_reason, usage
from server.routes.generating import DONE, Head, answer, chunk_event
from server.routes.openapi import body_of
from server.served_model import ServedModel

router = APIRouter(tags=["generation"])


class CompletionsRoute:
    """Whole answers and chunks have the same form here."""

    id_prefix = "cmpl-"

    def prepare(self, body: bytes, model: ServedModel) -> PreparedRequest:
        """Read the body. Raises ApiError."""
        return prepare_completion(body, model)

    def writer(self, request: PreparedRequest, head: Head) -> "CompletionWriter":
        """For the answer to one request."""
        return CompletionWriter(request, head)


class CompletionWriter:
    """Writes one answer, whole or as chunks."""

    def __init__(self, request: PreparedRequest, head: Head) -> None:
        """For the answer to `request`."""
        self._request = request
        self._head = head
        self._begun: set[int] = set()  # choices

    def whole(self, results: list[ChoiceResult], counts: TokenCounts) -> Completion:
        """All choices at once."""
        choices = [to_raw(self._choice(index, result, first=True)) for index, result in enumerate(results)]
        return self._body(choices, usage(counts))

    def delta(self, delta: ChoiceDelta, counts: TokenCounts) -> list[bytes]:
        """The next piece of one choice."""
        choice = self._choice(delta.index, delta, first=delta.index not in self._begun)
        self._begun.add(delta.index)
        return [chunk_event(self._body([choice], None if self._request.include_usage else UNSET))]

    def end(self, counts: TokenCounts) -> list[bytes]:
        """The counts, where they are wanted, and the end."""
        events = [chunk_event(self._body([], usage(counts)))] if self._request.include_usage else []
        return [*events, DONE]

    def failed(self, error: ApiError) -> list[bytes]:
        """The error in place of the end."""
        return [server_sent_event(to_json(error.body()))]

    def _body(
        self, choices: list[CompletionChoice] | list[msgspec.Raw], counts: Usage | UnsetType | None
    ) -> Completion:
        return Completion(self._head.id, self._head.created, self._head.model, choices, usage=counts)

    def _choice(self, index: int, part: ChoiceDelta | ChoiceResult, *, first: bool) -> CompletionChoice:
        request = self._request
        prompt = request.prompts[index // request.n]
        return CompletionChoice(
            index,
            part.text,
            None if request.logprobs is None else completion_logprobs(part.tokens),
            finish_reason(part.finish_reason),
            token_ids=list(part.token_ids) if request.return_token_ids else UNSET,
            prompt_token_ids=list(prompt.token_ids) if request.return_token_ids and first else UNSET,
        )


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
async def create_completion(request: Request, edge: CurrentEdge) -> Response:
    """Continue a text."""
    return await answer(request, edge, CompletionsRoute())
