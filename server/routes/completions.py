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
from server.protocol.shaping import (
    chunk_usage,
    completion_logprobs,
    finish_reason,
    prompt_logprobs,
    stop_reason,
    timings,
    usage,
)
from server.routes.direct_route import DirectRoute
from server.routes.generating import DONE, PLACEHOLDER, Head, Route, TextChunks, answer, chunk_event, has_plain_chunks
from server.routes.openapi import body_of

router = APIRouter(tags=["generation"], route_class=DirectRoute)


class CompletionWriter:
    """Writes one answer, whole or as chunks."""

    def __init__(self, request: PreparedRequest, head: Head) -> None:
        """For the answer to `request`."""
        self._request = request
        self._head = head
        self._begun: set[int] = set()  # choices
        self._is_plain = has_plain_chunks(request)
        self._text_chunks: dict[int, TextChunks] = {}  # of choices that have begun

    def whole(self, results: list[ChoiceResult], counts: TokenCounts) -> Completion:
        """All choices at once."""
        n = self._request.n
        choices: list[msgspec.Raw] = []
        for index, result in enumerate(results):
            if index % n == 0:  # all answers to a prompt repeat its scores
                scores = UNSET if self._request.prompt_logprobs is None else prompt_logprobs(result.prompt_tokens)
            choices.append(to_raw(self._choice(index, result, first=True, scores=scores)))
        return self._body(choices, usage(counts), counts)

    def delta(self, delta: ChoiceDelta, counts: TokenCounts) -> list[bytes]:
        """The next piece of one choice."""
        if self._is_plain and delta.finish_reason is None:
            chunks = self._text_chunks.get(delta.index)
            if chunks is None:
                chunks = self._text_chunks[delta.index] = self._text_chunks_of(delta.index, counts)
            return [chunks.event(delta.text)]
        choice = self._choice(delta.index, delta, first=delta.index not in self._begun)
        self._begun.add(delta.index)
        return [self._event([choice], chunk_usage(self._request, counts), counts)]

    def _text_chunks_of(self, index: int, counts: TokenCounts) -> TextChunks:
        choice = self._choice(index, ChoiceDelta(index, PLACEHOLDER, (), (), None), first=False)
        return TextChunks(self._event([choice], chunk_usage(self._request, counts), counts))

    def end(self, counts: TokenCounts) -> list[bytes]:
        """The counts, where they are wanted, and the end."""
        return [*([self._event([], usage(counts), counts)] if self._request.include_usage else []), DONE]

    def failed(self, error: ApiError) -> list[bytes]:
        """The error in place of the end."""
        return [server_sent_event(to_json(error.body()))]

    def _event(self, choices: list[CompletionChoice], counted: Usage | UnsetType | None, counts: TokenCounts) -> bytes:
        return chunk_event(self._body(choices, counted, counts), obfuscate=self._request.include_obfuscation)

    def _body(
        self,
        choices: list[CompletionChoice] | list[msgspec.Raw],
        counted: Usage | UnsetType | None,
        counts: TokenCounts,
    ) -> Completion:
        head = self._head
        return Completion(
            head.id,
            head.created,
            head.model,
            choices,
            system_fingerprint=head.system_fingerprint,
            usage=counted,
            timings=timings(self._request, counts),
        )

    def _choice(
        self,
        index: int,
        part: ChoiceDelta | ChoiceResult,
        *,
        first: bool,
        scores: msgspec.Raw | UnsetType = UNSET,
    ) -> CompletionChoice:
        request = self._request
        prompt = request.prompts[index // request.n]
        return CompletionChoice(
            index,
            part.text,
            None if request.logprobs is None else completion_logprobs(part.tokens),
            finish_reason(part.finish_reason),
            stop_reason=UNSET if part.finish_reason is None else stop_reason(part),
            prompt_logprobs=scores,
            token_ids=list(part.token_ids) if request.return_token_ids else UNSET,
            prompt_token_ids=list(prompt.token_ids) if request.return_token_ids and first else UNSET,
        )


ROUTE = Route("cmpl-", prepare_completion, CompletionWriter)


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
async def create_completion(request: Request, edge: CurrentEdge) -> Response:
    """Continue a text."""
    return await answer(request, edge, ROUTE)
