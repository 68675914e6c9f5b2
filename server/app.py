"""Puts the HTTP application together. Starts nothing: the engine's life is the business of `server.serve`."""

import time
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from kernels import __version__
from scheduler.request_report import RequestReport
from server.api_description import describe
from server.api_keys import key_ring
from server.config import Settings
from server.dashboard.data import data_routes
from server.dashboard.inspection_routes import inspection_routes
from server.dashboard.inspector import Inspector
from server.dashboard.pages import page_routes
from server.edge import Edge
from server.engine_client import EngineClient
from server.error_responses import add_error_handlers
from server.load_gate import LoadGate
from server.metrics import ServerMetrics
from server.middleware import (
    MESSAGES_REQUEST_ID_HEADER,
    REQUEST_ID_HEADER,
    ApiKeys,
    Observation,
    RequestLog,
)
from server.preparer import Preparer
from server.request_history import RequestHistory
from server.routes import (
    chat,
    completions,
    embeddings,
    messages,
    models,
    operations,
    requests,
    responses,
    tokenization,
)
from server.routes.generating import IGNORED_FIELDS_HEADER, TRUNCATED_TOKENS_HEADER
from server.served_model import longest_token
from server.tokenizer import Tokenizer
from server.usage_metrics import NO_KEY

if TYPE_CHECKING:
    from server.tracing import Tracing

_EXPOSED_HEADERS = (
    REQUEST_ID_HEADER,
    MESSAGES_REQUEST_ID_HEADER,
    IGNORED_FIELDS_HEADER,
    TRUNCATED_TOKENS_HEADER,
    "retry-after",
)


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    settings: Settings,
    preparer: Preparer | None = None,
    tracing: "Tracing | None" = None,
    inspector: Inspector | None = None,
) -> FastAPI:
    """The application that serves the model behind `engine`, which may still be loading.

    `preparer` reads large requests in another process; without one they are read in threads of this one.
    `tracing` makes a span of each request. `inspector` looks at prompts for the dashboard.
    """
    app = FastAPI(title="Octavo", version=__version__, redirect_slashes=False)
    keys = key_ring(settings)
    metrics = ServerMetrics(engine, settings, [*keys.names, *([NO_KEY] if keys.is_open else [])])
    history = RequestHistory()
    engine.on_report = partial(_take_report, metrics, history)
    app.state.edge = Edge(
        engine=engine,
        tokenizer=tokenizer,
        settings=settings,
        metrics=metrics,
        longest_token=longest_token(tokenizer),
        preparer=preparer or Preparer(None, tokenizer),
        history=history,
        created=int(time.time()),
    )
    for routes in (completions, chat, responses, messages, embeddings, models, requests, operations, tokenization):
        app.include_router(routes.router)
        for route in routes.router.routes:
            assert isinstance(route, APIRoute)
            metrics.http.expect(route.path, route.methods)
    if settings.enable_dashboard:
        app.include_router(page_routes())
        app.include_router(data_routes(engine))
        if inspector is not None:
            app.include_router(inspection_routes(inspector))
    add_error_handlers(app)
    describe(app, needs_key=not keys.is_open, has_admin_key=keys.has_admin_key)
    # The last one added sees a request first.
    app.add_middleware(
        LoadGate,
        max_requests=settings.max_open_requests,
        max_bytes=settings.max_open_body_memory,
        has_keys=not keys.is_open,
        retry_after=lambda: None if engine.stats is None else engine.stats.queue_seconds,
    )
    app.add_middleware(ApiKeys, keys=keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=_EXPOSED_HEADERS,
        )
    if settings.enable_log_requests:
        app.add_middleware(RequestLog, max_bytes=settings.max_log_len)
    app.add_middleware(Observation, metrics=metrics, history=history, root_path=settings.root_path, tracing=tracing)
    return app


def _take_report(metrics: ServerMetrics, history: RequestHistory, report: RequestReport) -> None:
    """What the engine says of a prompt at its end."""
    metrics.observe_report(report)
    history.take(report)
