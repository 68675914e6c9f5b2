"""`POST /v1/completions`."""

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from server.edge import CurrentEdge
from server.generation import ChoiceDelta, ChoiceResult
from server.preparation import PreparedRequest, prepare_completion
from server.protocol.completions import CompletionRequest
from server.protocol.responses import Completion, CompletionChoice, Usage, to_raw
from server.protocol.shaping import completion_logprobs, finish_reason
from server.routes.generating import Head, answer
from server.routes.openapi import body_of

router = APIRouter(tags=["generation"])


class CompletionShape:
    """Whole answers and chunks have the same form here."""

    id_prefix = "cmpl-"

    def whole(self, request: PreparedRequest, results: list[ChoiceResult], head: Head, counts: Usage) -> Completion:
        """All choices at once."""
        choices = [to_raw(_choice(request, index, result, first=True)) for index, result in enumerate(results)]
        return Completion(head.id, head.created, head.model, choices, usage=counts)

    def chunk(self, request: PreparedRequest, delta: ChoiceDelta, head: Head, *, first: bool) -> Completion:
        """The next piece of one choice."""
        choice = _choice(request, delta.index, delta, first=first)
        return Completion(head.id, head.created, head.model, [choice], usage=None if request.include_usage else UNSET)

    def usage_chunk(self, head: Head, counts: Usage) -> Completion:
        """No choices, only the counts."""
        return Completion(head.id, head.created, head.model, [], usage=counts)


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
async def create_completion(request: Request, edge: CurrentEdge) -> Response:
    """Continue a text."""
    return await answer(request, edge, prepare_completion, CompletionShape())


def _choice(request: PreparedRequest, index: int, part: ChoiceDelta | ChoiceResult, *, first: bool) -> CompletionChoice:
    prompt = request.prompts[index // request.n]
    return CompletionChoice(
        index,
        part.text,
        None if request.logprobs is None else completion_logprobs(part.tokens),
        finish_reason(part.finish_reason),
        token_ids=list(part.token_ids) if request.return_token_ids else UNSET,
        prompt_token_ids=list(prompt.token_ids) if request.return_token_ids and first else UNSET,
    )
