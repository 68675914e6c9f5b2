"""Runs `octavo serve` from this checkout as a process of its own, for as long as a benchmark needs it."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from benchmarks.machine import ROOT

START_SECONDS = 300.0  # the first start may download the model
STOP_SECONDS = 30.0


class ServerDidNotStart(RuntimeError):
    """The server ended or never got ready; the message holds what it printed."""


@contextmanager
def local_server(flags: Sequence[str] = (), module: str = "server.cli", api_key: str | None = None) -> Iterator[str]:
    """Serve on a free port with the given flags of `octavo serve`; yields the URL once it is ready.

    `module` is run as a program: the command itself, or another that takes its arguments. Where the flags set keys,
    `api_key` is one of them.

    Raises:
        ServerDidNotStart: with the server's own output.
    """
    port = _free_port()
    command = [sys.executable, "-m", module, "serve", "--port", str(port), *flags]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            if not _gets_ready(process, url, api_key):
                log.seek(0)
                raise ServerDidNotStart(f"{' '.join(command)} did not get ready:\n{log.read()}")
            yield url
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _gets_ready(process: "subprocess.Popen[bytes]", url: str, api_key: str | None) -> bool:
    deadline = time.monotonic() + START_SECONDS
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    with httpx.Client(trust_env=False, timeout=5, headers=headers) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if client.get(f"{url}/health/ready").status_code == 200:
                    return True
            except httpx.HTTPError:
                pass  # it does not listen yet
            time.sleep(0.1)
    return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
