"""Health, metrics and version: what operators and their machines ask."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.exposition import gzip_accepted
from starlette.responses import Response

from kernels import __version__
from server.edge import CurrentEdge, Edge
from server.middleware import LIVENESS_PATH

router = APIRouter(tags=["operations"])


@router.head(LIVENESS_PATH)
@router.get(LIVENESS_PATH)
async def live() -> dict[str, str]:
    """The event loop answers. Asked without a key."""
    return {"status": "live"}


@router.head("/health/ready")
@router.head("/health")
@router.get("/health/ready")
@router.get("/health")
async def ready(edge: CurrentEdge) -> Response:
    """The model is loaded, the engine was heard from lately, and new requests are taken. Asked without a key."""
    return JSONResponse({"status": "ready"}) if edge.engine.ready else _not_ready(edge)


@router.get("/metrics")
async def metrics(request: Request, edge: CurrentEdge) -> Response:
    """Every series, in Prometheus's text format."""
    headers = {"Content-Type": CONTENT_TYPE_LATEST, "Vary": "Accept-Encoding"}
    is_compressed = gzip_accepted(request.headers.get("accept-encoding", ""))
    if is_compressed:
        headers["Content-Encoding"] = "gzip"
    return Response(await edge.metrics.exposition(is_compressed=is_compressed), headers=headers)


@router.get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


def _not_ready(edge: Edge) -> Response:
    if edge.engine.draining:
        status = "draining"
    elif edge.engine.info is None:
        status = "loading"
    else:
        status = "engine unavailable"
    return JSONResponse({"status": status}, 503, {"Retry-After": "1"})
