"""The routes of the page "Inspector": a prompt to look at, and the tensors of what was computed for it.

They are part of the dashboard's data, so they are for those who may see that: see server/middleware.py.
"""

import uuid
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from server.dashboard.inspection_body import MAX_BODY_BYTES, prepare_inspection
from server.dashboard.inspection_messages import (
    MAX_PROMPT_TOKENS,
    MAX_TOKENS,
    Inspected,
    InspectPrompt,
    Picture,
    ShowHead,
    ShowInput,
)
from server.dashboard.inspection_report import inspection_report, inspector_limits
from server.dashboard.inspector import Inspector
from server.dashboard.paths import DATA_PATH
from server.disconnect import until_disconnect
from server.edge import CurrentEdge, Edge, key_name_of
from server.engine_errors import EngineUnavailable
from server.messages import EngineInfo
from server.protocol.responses import to_json
from server.routes.generating import read_body

_Place = Annotated[int, Query(ge=0, lt=1 << 31)]  # of a layer, a head, a position; the process knows how many there are
_NOT_KEPT = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def inspection_routes(inspector: Inspector) -> APIRouter:
    """The routes that ask `inspector`."""
    router = APIRouter(prefix=f"{DATA_PATH}/inspector", include_in_schema=False)

    @router.get("")
    async def get_limits(edge: CurrentEdge) -> Response:
        """What may be asked for."""
        return _json(inspector_limits(MAX_PROMPT_TOKENS, MAX_TOKENS, edge.tokenizer))

    @router.post("")
    async def inspect_prompt(request: Request, edge: CurrentEdge) -> Response:
        """Compute a prompt, and tell all of it but its large tensors."""
        body = await read_body(request, MAX_BODY_BYTES)
        model = edge.served_model()
        prompt = await edge.preparer.run(prepare_inspection, body, model, key_name_of(request))
        inspection_id = uuid.uuid4().hex
        info = _info(edge)
        question = InspectPrompt(inspection_id, prompt.token_ids, prompt.max_tokens)
        inspected = await until_disconnect(request.receive, inspector.ask(question, info))
        assert isinstance(inspected, Inspected)
        return _json(inspection_report(inspection_id, model.names[0], inspected, info, edge.tokenizer))

    @router.get("/{inspection_id}/head")
    async def get_head(inspection_id: str, layer: _Place, head: _Place, edge: CurrentEdge) -> Response:
        """What a query head of a layer did, see `server.dashboard.inspection_picture`."""
        return await picture(ShowHead(inspection_id, layer, head), edge)

    @router.get("/{inspection_id}/input")
    async def get_input(inspection_id: str, layer: _Place, position: _Place, edge: CurrentEdge) -> Response:
        """What went into a layer's attention at a position, in the same form."""
        return await picture(ShowInput(inspection_id, layer, position), edge)

    async def picture(question: ShowHead | ShowInput, edge: Edge) -> Response:
        answer = await inspector.ask(question, _info(edge))
        assert isinstance(answer, Picture)
        return Response(answer.content, headers=_NOT_KEPT, media_type="application/octet-stream")

    return router


def _info(edge: Edge) -> EngineInfo:
    """Of the engine whose model is looked at. Raises EngineUnavailable."""
    info = edge.engine.info
    if info is None or edge.engine.draining:
        raise EngineUnavailable("The model is still loading, or the server shuts down.")
    return info


def _json(content: object) -> Response:
    return Response(to_json(content), headers=_NOT_KEPT, media_type="application/json")
