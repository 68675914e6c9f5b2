"""`GET /v1/requests/{id}`: what happened to a request, for whoever sent it and for the admin."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from scheduler.request_report import RequestReport
from server.edge import CurrentEdge
from server.engine_errors import EngineUnavailable
from server.errors import RequestNotFound
from server.protocol.responses import to_json
from server.request_story import MAX_SHOWN_PROMPTS, tell

router = APIRouter(prefix="/v1/requests", tags=["requests"])


@router.get("/{id}")
async def get_request(id: str, request: Request, edge: CurrentEdge) -> Response:
    """Why it waited, what of it was cached, what it was preempted by. `id` is the answer's, or its x-request-id.

    Live requests and the last few thousand that have ended; those of other keys are not found. Raises
    RequestNotFound, EngineUnavailable.
    """
    asker: str | None = request.state.key_name
    trace = edge.history.find(id, asker)
    if trace is None:
        raise RequestNotFound(
            f"There is no request {id[:256]!r} of this key, or it ended too long ago to be remembered.", "id"
        )
    wanted = [engine_id for _, engine_id in zip(range(MAX_SHOWN_PROMPTS), trace.engine_ids(), strict=False)]
    missing = [engine_id for engine_id in wanted if engine_id not in trace.reports]
    live: list[RequestReport] = []
    if missing and edge.history.expects_reports(trace):
        try:
            live = await edge.engine.inspect(missing)
        except EngineUnavailable:
            if trace.status is None:
                raise  # of one that has ended, perhaps with the engine, what is known can be told
    info = edge.engine.info
    details = tell(
        trace, {report.request_id: report for report in live}, asker, None if info is None else info.block_size
    )
    return Response(to_json(details), media_type="application/json")
