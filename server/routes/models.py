"""`GET /v1/models` and `GET /v1/models/{id}`."""

from fastapi import APIRouter
from starlette.responses import Response

from server.edge import CurrentEdge, Edge
from server.errors import ModelNotFound
from server.protocol.responses import ModelCard, ModelList, to_json

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
async def list_models(edge: CurrentEdge) -> Response:
    """Every name that requests may give."""
    cards = [_card(name, edge) for name in edge.settings.served_names]
    return Response(to_json(ModelList(cards)), media_type="application/json")


@router.get("/{model:path}")  # names may hold a slash: org/name
async def get_model(model: str, edge: CurrentEdge) -> Response:
    """One of them."""
    if model not in edge.settings.served_names:
        raise ModelNotFound(f"The model {model[:256]!r} is not served here.", "model")
    return Response(to_json(_card(model, edge)), media_type="application/json")


def _card(name: str, edge: Edge) -> ModelCard:
    info = edge.engine.info
    return ModelCard(name, edge.created, info.max_model_len if info is not None else None)
