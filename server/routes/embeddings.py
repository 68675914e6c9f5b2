"""`POST /v1/embeddings`."""

import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.disconnect import until_disconnect
from server.edge import CurrentEdge, Edge, key_name_of
from server.embedding import FLOAT_BYTES, EmbeddingRun, answer_pieces, prepare_embedding
from server.json_response import JsonResponse
from server.off_loop import off_loop_if_large
from server.protocol.embeddings import EmbeddingRequest
from server.routes.generating import TRUNCATED_TOKENS_HEADER, ignored_fields_header, read_body
from server.routes.openapi import body_of

router = APIRouter(tags=["embeddings"])


@router.post("/v1/embeddings", openapi_extra=body_of(EmbeddingRequest))
async def create_embeddings(request: Request, edge: CurrentEdge) -> Response:
    """Turn texts into vectors: the model's hidden states, pooled over each text's tokens."""
    arrival = time.perf_counter()
    body = await read_body(request, edge.settings.max_body_size)
    return await until_disconnect(request.receive, _answer(request, body, arrival, edge))


async def _answer(request: Request, body: bytes, arrival: float, edge: Edge) -> Response:
    prepared = await edge.preparer.run(prepare_embedding, body, edge.served_model(), key_name_of(request))
    trace = edge.trace(request, f"embd-{uuid.uuid4().hex}", prepared.model, len(prepared.prompts))
    run = EmbeddingRun(prepared, trace, edge.engine, edge.metrics, arrival, edge.submitter(request))
    pooled = await run.pooled()
    num_values = sum(map(len, pooled)) // FLOAT_BYTES
    pieces = await off_loop_if_large(num_values, lambda: answer_pieces(prepared, pooled, run.num_cached_tokens))
    headers = dict(ignored_fields_header(prepared.ignored_fields))
    if prepared.num_truncated_tokens:
        headers[TRUNCATED_TOKENS_HEADER] = str(prepared.num_truncated_tokens)
    return JsonResponse(pieces, headers)
