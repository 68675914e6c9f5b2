"""Runs `octavo serve` from this checkout as a process of its own, for as long as a benchmark needs it."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.machine import ROOT
from benchmarks.server_process import ServerDidNotStart, free_port, server_process

__all__ = ["ServerDidNotStart", "local_server"]

START_SECONDS = 300.0  # the first start may download the model


@contextmanager
def local_server(flags: Sequence[str] = (), module: str = "server.cli", api_key: str | None = None) -> Iterator[str]:
    """Serve on a free port with the given flags of `octavo serve`; yields the URL once it is ready.

    `module` is run as a program: the command itself, or another that takes its arguments. Where the flags set keys,
    `api_key` is one of them.

    Raises:
        ServerDidNotStart: with the server's own output.
    """
    port = free_port()
    command = [sys.executable, "-m", module, "serve", "--port", str(port), *flags]
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    with server_process(command, f"http://127.0.0.1:{port}", ROOT, {}) as process:
        process.wait_until_ready("/health/ready", START_SECONDS, headers)
        yield process.url
