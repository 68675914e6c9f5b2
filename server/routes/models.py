"""`GET /v1/models` and `GET /v1/models/{id}`. Anthropic's clients, which name their version, get their own form."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from server.edge import CurrentEdge, Edge
from server.errors import InvalidRequest, ModelNotFound
from server.protocol.models import AnthropicModel, AnthropicModelPage, ModelCard, ModelList
from server.protocol.responses import to_json

router = APIRouter(prefix="/v1/models", tags=["models"])

AnthropicVersion = Annotated[str | None, Header()]
_DEFAULT_PAGE = 20  # Anthropic's
_MAX_PAGE = 1000


@router.get("")
async def list_models(
    edge: CurrentEdge,
    anthropic_version: AnthropicVersion = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_PAGE, description="Anthropic's form only.")] = _DEFAULT_PAGE,
    before_id: Annotated[str | None, Query(description="Anthropic's form only.")] = None,
    after_id: Annotated[str | None, Query(description="Anthropic's form only.")] = None,
) -> Response:
    """Every name that requests may give."""
    names = edge.settings.served_names
    if anthropic_version is None:
        return _json(ModelList([_card(name, edge) for name in names]))
    if before_id is not None and after_id is not None:
        raise InvalidRequest("before_id and after_id exclude each other.", "before_id")
    if after_id is not None:
        names = names[_place(after_id, "after_id", edge) + 1 :]
    if before_id is not None:
        names = names[: _place(before_id, "before_id", edge)]
    page = names[-limit:] if before_id is not None else names[:limit]
    ends = (page[0], page[-1]) if page else (None, None)
    return _json(AnthropicModelPage([_anthropic_model(name, edge) for name in page], len(page) < len(names), *ends))


@router.get("/{model:path}")  # names may hold a slash: org/name
async def get_model(model: str, edge: CurrentEdge, anthropic_version: AnthropicVersion = None) -> Response:
    """One of them."""
    if model not in edge.settings.served_names:
        raise ModelNotFound(f"The model {model[:256]!r} is not served here.", "model")
    return _json(_card(model, edge) if anthropic_version is None else _anthropic_model(model, edge))


def _place(name: str, param: str, edge: Edge) -> int:
    names = edge.settings.served_names
    if name not in names:
        raise InvalidRequest(f"{param} is {name[:256]!r}, which is no model that is served here.", param)
    return names.index(name)


def _card(name: str, edge: Edge) -> ModelCard:
    return ModelCard(name, edge.created, _max_model_len(edge), root=edge.settings.served_names[0])


def _anthropic_model(name: str, edge: Edge) -> AnthropicModel:
    created_at = datetime.fromtimestamp(edge.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(name, name, created_at, _max_model_len(edge), _max_model_len(edge))


def _max_model_len(edge: Edge) -> int | None:
    info = edge.engine.info
    return info.max_model_len if info is not None else None


def _json(body: object) -> Response:
    return Response(to_json(body), media_type="application/json")
