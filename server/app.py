"""Puts the HTTP application together. Starts nothing: the engine's life is the business of `server.serve`."""

import time

from fastapi import FastAPI

from kernels import __version__
from server.config import Settings
from server.edge import Edge
from server.engine_client import EngineClient
from server.error_responses import add_error_handlers
from server.metrics import ServerMetrics
from server.middleware import ApiKeys, Observation
from server.preparer import Preparer
from server.routes import chat, completions, embeddings, messages, models, operations, responses, tokenization
from server.served_model import longest_token
from server.tokenizer import Tokenizer


def create_app(
    engine: EngineClient, tokenizer: Tokenizer, settings: Settings, preparer: Preparer | None = None
) -> FastAPI:
    """The application that serves the model behind `engine`, which may still be loading.

    `preparer` reads large requests in another process; without one they are read in threads of this one.
    """
    app = FastAPI(title="Octavo", version=__version__, redirect_slashes=False)
    metrics = ServerMetrics(settings.served_names[0], engine)
    app.state.edge = Edge(
        engine=engine,
        tokenizer=tokenizer,
        settings=settings,
        metrics=metrics,
        longest_token=longest_token(tokenizer),
        preparer=preparer or Preparer(None, tokenizer),
        created=int(time.time()),
    )
    for routes in (completions, chat, responses, messages, embeddings, models, operations, tokenization):
        app.include_router(routes.router)
    add_error_handlers(app)
    # The last one added sees a request first.
    app.add_middleware(ApiKeys, keys=settings.api_key)
    app.add_middleware(Observation, metrics=metrics)
    return app
