"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.disconnect import until_disconnect
from server.edge import CurrentEdge, Edge, key_name_of
from server.json_response import JsonResponse
from server.protocol.responses import to_json
from server.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from server.routes.generating import ignored_fields_header, read_body
from server.routes.openapi import body_of
from server.served_model import ServedModel
from server.tokenization import detokenise_body, tokenise_body

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
async def tokenize(request: Request, edge: CurrentEdge) -> Response:
    """Cut a text or a conversation into the model's tokens. It may be longer than the model's window."""
    return await _answer(request, edge, tokenise_body)


@router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
async def detokenize(request: Request, edge: CurrentEdge) -> Response:
    """Put tokens together to a text; what is not UTF-8 becomes U+FFFD."""
    return await _answer(request, edge, detokenise_body)


@router.get("/tokenizer_info")
async def tokenizer_info(edge: CurrentEdge) -> Response:
    """The special tokens by their names, as texts or null, and the chat template.

    Evaluation tools ask it before they tokenise over `/tokenize`, and do without where a server has none.
    """
    tokenizer = edge.tokenizer
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token")) | dict(tokenizer.special_tokens)
    template = tokenizer.chat_template
    content = to_json({**named, "chat_template": None if template is None else template.source})
    return Response(content, media_type="application/json")


async def _answer(
    request: Request, edge: Edge, answer: Callable[[bytes, ServedModel], tuple[bytes, list[str]]]
) -> Response:
    body = await read_body(request, edge.settings.max_body_size)
    working = edge.preparer.run(answer, body, edge.served_model(), key_name_of(request))
    content, ignored_fields = await until_disconnect(request.receive, working)
    return JsonResponse([content], ignored_fields_header(ignored_fields))
