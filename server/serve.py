"""The command `serve`: brings up the engine and the HTTP server, and takes both down in order.

SIGTERM or SIGINT: new requests get 503, running ones finish for up to --shutdown-timeout, then the exit code is 0. A
second signal ends all at once. Knows no routes.
"""

import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop

from server.app import create_app
from server.config import Settings
from server.download_progress import terminal_progress
from server.engine_client import EngineClient, EngineStartError
from server.http_protocol import BoundedHttpProtocol
from server.logging_setup import configure_logging
from server.model_store import ModelStoreError, resolve
from server.startup_display import StartupDisplay, print_ready
from server.tokenizer import TokenizerError, load_tokenizer

logger = logging.getLogger("octavo.serve")

_EXIT_FAILURE = 1
_EXIT_USAGE = 2
_CLOSE_SECONDS = 5  # for connections to take the end of their answers


def serve(settings: Settings) -> int:
    """Serve until a signal comes or the engine is lost for good; returns the exit code."""
    configure_logging(settings.log_level)
    try:
        with terminal_progress() as on_progress:
            model_path = resolve(settings.model, settings.home, on_progress)
    except ModelStoreError as error:
        return _fail(str(error), _EXIT_USAGE)
    try:
        listener = _listen(settings.host, settings.port)
    except OSError as error:
        # socket adds the address to the reason, in brackets
        reason = str(error.strerror).partition(" (")[0]
        return _fail(f"Cannot listen on {settings.host} port {settings.port}: {reason}.")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, listener:
        return runner.run(_serve(settings, model_path, listener))


class _Server(uvicorn.Server):
    """Drains the engine before it closes its sockets, so that requests which come meanwhile get an answer."""

    def __init__(self, config: uvicorn.Config, engine: EngineClient, shutdown_timeout: float) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._engine = engine
        self._shutdown_timeout = shutdown_timeout
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self.begin_exit, signal.Signals(sig).name)

    def begin_exit(self, cause: str) -> None:
        """First time: drain. Second time: end at once."""
        if self._draining is None:
            logger.info("Shutting down on %s: running requests may finish.", cause)
            self._draining = asyncio.create_task(self._drain())
            return
        logger.warning("Ending at once on a second %s.", cause)
        self._draining.cancel()
        self.exit_code = _EXIT_FAILURE
        self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        try:
            await self._engine.stop(self._shutdown_timeout)
        finally:
            self.should_exit = True


async def _serve(settings: Settings, model_path: Path, listener: socket.socket) -> int:
    with StartupDisplay() as display:
        engine = EngineClient(settings.engine_config(model_path), display.show)
        starting = asyncio.create_task(engine.start())
        try:
            # Beside the engine, which takes longer.
            tokenizer = await asyncio.to_thread(load_tokenizer, model_path)
        except TokenizerError as error:
            await _give_up(engine, starting)
            return _fail(str(error))
        app = await asyncio.to_thread(create_app, engine, tokenizer, settings)
        server = _Server(_uvicorn_config(app), engine, settings.shutdown_timeout)
        serving = asyncio.create_task(server.serve([listener]))
        await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if starting.done() and not serving.done():
            print_ready(settings, model_path, starting.result(), listener.getsockname()[1])
            await _until_over(serving, engine)
    except EngineStartError as error:
        if not engine.draining:  # a signal during the start is no failure
            server.exit_code = _fail(str(error))
    if engine.failed.is_set():
        server.exit_code = _fail("The engine died and does not start again.")
    server.should_exit = True
    await serving
    await _give_up(engine, starting)
    return server.exit_code


async def _until_over(serving: "asyncio.Task[None]", engine: EngineClient) -> None:
    failed = asyncio.create_task(engine.failed.wait())
    try:
        await asyncio.wait({serving, failed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        failed.cancel()


async def _give_up(engine: EngineClient, starting: "asyncio.Task[object]") -> None:
    """End the engine's process, whatever it does."""
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await engine.stop(0)


def _uvicorn_config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # a FastAPI application
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # the application logs with request ids
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, before the model is loaded: a port in use shows at once. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _fail(message: str, code: int = _EXIT_FAILURE) -> int:
    print(f"octavo: {message}", file=sys.stderr, flush=True)
    return code
