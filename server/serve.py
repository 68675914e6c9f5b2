"""The command `serve`: brings up the engine and the HTTP server, and takes both down in order.

SIGTERM or SIGINT: new requests get 503, running ones finish for up to --shutdown-timeout, then the exit code is 0. A
second signal ends all at once. Knows no routes.
"""

import asyncio
import logging
import math
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from server.api_keys import key_ring
from server.config import Settings
from server.download_progress import terminal_progress
from server.engine_client import EngineClient
from server.engine_errors import EngineRefusedSettings, EngineStartError
from server.garbage_collection import spare_collections
from server.http_protocol import BoundedHttpProtocol
from server.log_lines import LogLine
from server.logging_setup import CONSOLE, configure_logging
from server.loop_lag import LoopLag
from server.model_store import ModelStoreError, resolve
from server.settings_error import SettingsError
from server.startup_display import StartupDisplay, print_ready

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.dashboard.inspector import Inspector
    from server.preparer import Preparer
    from server.tracing import Tracing

logger = logging.getLogger("octavo.serve")
console = logging.getLogger(CONSOLE)

_EXIT_FAILURE = 1
_EXIT_USAGE = 2
_SWITCH_SECONDS = 0.0005
_MAX_FILES = 65536
_KEEP_ALIVE_SECONDS = 75  # longer than proxies keep an idle connection: the side that reuses it should end it
_LAST_SPANS_SECONDS = 5.0  # for the collector to take them
_CLOSE_SECONDS = 5  # for connections to take the end of their answers


def serve(settings: Settings) -> int:
    """Serve until a signal comes or the engine is lost for good; returns the exit code."""
    configure_logging(settings.log_level, settings.log_format)
    try:
        key_ring(settings)  # keys that cannot be used show at once
        tracing = None if settings.otlp_traces_endpoint is None else _start_tracing(settings.otlp_traces_endpoint)
    except SettingsError as error:
        return _fail(str(error), _EXIT_USAGE)
    _raise_file_limit()
    # The event loop waits at most this long for each thread that computes; Python's own 5 ms would show in every gap.
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        with terminal_progress(console.info if settings.log_format == "json" else None) as on_progress:
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
        return runner.run(_serve(settings, model_path, listener, tracing))


class _CannotLoad(RuntimeError):
    """The model has no tokenizer that can be used; the message is for the person who started the server."""


class _Server(uvicorn.Server):
    """Drains the engine before it closes its sockets, so that requests which come meanwhile get an answer."""

    def __init__(self, config: uvicorn.Config, engine: EngineClient, shutdown_timeout: float) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._engine = engine
        self._shutdown_timeout = shutdown_timeout
        self._draining: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """None: they are wanted before there is a server, and mean more than uvicorn makes of them."""
        yield

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
        deadline = time.monotonic() + self._shutdown_timeout
        try:
            await self._engine.stop(self._shutdown_timeout)
        finally:
            # Whoever reads slowly has the rest of the time for what is already generated.
            self.config.timeout_graceful_shutdown = max(_CLOSE_SECONDS, math.ceil(deadline - time.monotonic()))
            self.should_exit = True


async def _serve(settings: Settings, model_path: Path, listener: socket.socket, tracing: "Tracing | None") -> int:
    with StartupDisplay(settings.log_format) as display:
        engine = EngineClient(settings.engine_config(model_path), display.show)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)  # its process begins before threads of this one want the processors
        loading = asyncio.create_task(asyncio.to_thread(_load_app, engine, model_path, settings, tracing))
        _on_signals(lambda _: loading.cancel())
        try:
            app, preparer, inspector = await loading  # beside the engine, which takes longer
        except (_CannotLoad, asyncio.CancelledError) as error:
            await _give_up(engine, starting)
            return 0 if loading.cancelled() else _fail(str(error))
        preparing = asyncio.create_task(asyncio.to_thread(preparer.start))
        server = _Server(_uvicorn_config(app), engine, settings.shutdown_timeout)
        _on_signals(server.begin_exit)
        serving = asyncio.create_task(server.serve([listener]))
        loop_lag = LoopLag(app.state.edge.metrics.observe_loop_lag)
        loop_lag.start()
        await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if starting.done() and not serving.done():
            print_ready(settings, model_path, starting.result(), listener.getsockname()[1])
            spare_collections()
            await _until_over(serving, engine)
    except EngineStartError as error:
        if not engine.draining:  # a signal during the start is no failure
            refused = isinstance(error, EngineRefusedSettings)
            server.exit_code = _fail(str(error), _EXIT_USAGE if refused else _EXIT_FAILURE)
    if engine.failed.is_set():
        server.exit_code = _fail("The engine died and does not start again.")
    server.should_exit = True
    await serving
    await inspector.stop()
    loop_lag.stop()
    await _give_up(engine, starting)
    app.state.edge.history.flush()
    if tracing is not None and not server.force_exit:
        await asyncio.to_thread(tracing.close, _LAST_SPANS_SECONDS)
    await asyncio.gather(preparing, return_exceptions=True)
    await asyncio.to_thread(preparer.stop)
    return server.exit_code


def _start_tracing(endpoint: str) -> "Tracing":
    """Raises SettingsError where the extra is missing, or a variable that the SDK reads makes no sense to it."""
    try:
        from server.tracing import start_tracing

        return start_tracing(endpoint)
    except ImportError as error:
        raise SettingsError(
            f"--otlp-traces-endpoint needs OpenTelemetry, which cannot be imported ({error}): "
            "pip install 'octavo[tracing]'."
        ) from None
    except ValueError as error:
        raise SettingsError(f"OpenTelemetry cannot be set up: {error}") from None


def _load_app(
    engine: EngineClient, model_path: Path, settings: Settings, tracing: "Tracing | None"
) -> "tuple[FastAPI, Preparer, Inspector]":
    # Imported while the engine starts: it takes a third of the time that the engine does.
    from server.app import create_app
    from server.dashboard.inspector import Inspector
    from server.preparer import Preparer
    from server.tokenizer import TokenizerError, load_tokenizer

    try:
        tokenizer = load_tokenizer(model_path)
    except TokenizerError as error:
        raise _CannotLoad(str(error)) from error
    preparer = Preparer(model_path, tokenizer, settings.log_level, settings.log_format)
    inspector = Inspector(settings.engine_config(model_path))
    return create_app(engine, tokenizer, settings, preparer, tracing, inspector), preparer, inspector


def _on_signals(handler: Callable[[str], object]) -> None:
    """From now on, call `handler` with the name of a signal to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, handler, number.name)


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


def _uvicorn_config(app: "FastAPI") -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # the application logs with request ids
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, before the model is loaded: a port in use shows at once. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _raise_file_limit() -> None:
    """Each connection takes a descriptor, and the limit that shells set for programs is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _fail(message: str, code: int = _EXIT_FAILURE) -> int:
    console.error(LogLine(message, {}, f"octavo: {message}"))
    return code
