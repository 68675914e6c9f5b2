"""The routes of the dashboard's data: for the admin, or for everyone where there are no keys: see server/middleware.py.

Their answers are the pages' own business and no part of the API that is described.
"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.dashboard.overview import OverviewSnapshots
from server.dashboard.paths import DATA_PATH
from server.dashboard.snapshots import PoolSnapshots
from server.edge import CurrentEdge
from server.engine_client import EngineClient

_NOT_KEPT = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def data_routes(engine: EngineClient) -> APIRouter:
    """The routes, with the pictures that they share."""
    router = APIRouter(prefix=DATA_PATH, include_in_schema=False)
    pool = PoolSnapshots(engine)
    live = OverviewSnapshots()

    @router.get("/live")
    async def get_live(edge: CurrentEdge) -> Response:
        """The server as of now, or of a part of a second ago."""
        return Response(live.newest(edge), headers=_NOT_KEPT, media_type="application/json")

    @router.get("/pool")
    async def get_pool(request: Request, known: int = 0) -> Response:
        """The block pool, see `server.dashboard.pool_image`; 204 while it is that of the number `known`."""
        picture = await pool.newest()
        if picture.number == known:
            return Response(status_code=204, headers=_NOT_KEPT)
        headers = {**_NOT_KEPT, "Vary": "Accept-Encoding"}
        content = picture.content
        if picture.packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
            content = picture.packed
            headers["Content-Encoding"] = "gzip"
        return Response(content, headers=headers, media_type="application/octet-stream")

    return router
