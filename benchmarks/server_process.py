"""A server as a family of processes: started, waited for, held still, measured, stopped. Knows no server by name."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx

STOP_SECONDS = 30.0
_LOG_BYTES = 4000  # of what a server printed, the end of which tells why it ended


class ServerDidNotStart(RuntimeError):
    """The server ended or never got ready; the message holds what it printed."""


class ServerProcess:
    """A program that serves HTTP, with all the processes that it starts in turn."""

    def __init__(self, command: Sequence[str], url: str, directory: Path, environment: Mapping[str, str]) -> None:
        """Start `command` in `directory`, with `environment` beside this process's own.

        Raises:
            ServerDidNotStart: it cannot be run at all.
        """
        self.url = url
        self._command = tuple(command)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed by stop()
        try:
            self._process = subprocess.Popen(
                self._command,
                cwd=directory,
                env={**os.environ, **environment},
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the benchmark, which then stops its servers
            )
        except OSError as error:
            self._log.close()
            raise ServerDidNotStart(f"{' '.join(self._command)} cannot be run: {error}") from error

    def wait_until_ready(self, path: str, seconds: float, headers: Mapping[str, str]) -> float:
        """Ask `path` until it answers 200; returns how long that took, in seconds.

        Raises:
            ServerDidNotStart: with the server's own output.
        """
        begin = time.monotonic()
        with httpx.Client(trust_env=False, timeout=5, headers=dict(headers)) as client:
            while self.is_running() and time.monotonic() < begin + seconds:
                try:
                    if client.get(f"{self.url}{path}").status_code == 200:
                        return time.monotonic() - begin
                except httpx.HTTPError:
                    pass  # it does not listen yet
                time.sleep(0.1)
        raise ServerDidNotStart(f"{' '.join(self._command)} did not get ready:\n{self.printed()}")

    def is_running(self) -> bool:
        """Whether the program that was started has not ended."""
        return self._process.poll() is None

    def printed(self) -> str:
        """The end of what the server printed."""
        # Where the server writes next must not move: it shares the file's position.
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES))
        return text.decode("utf-8", "replace")

    def processor_seconds(self) -> float:
        """Processor time of all processes of the family that run now, since their starts."""
        return sum(each.ticks for each in self._family()) / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        """Hold all processes of the family still until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the family run again."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the family: the program by a request to end, and what then is left by force."""
        self.resume()
        family = self._family()
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        left = {(each.process_id, each.started) for each in _all_processes()}
        for each in family:
            if (each.process_id, each.started) in left:
                with suppress(ProcessLookupError):  # it has ended by itself just now
                    os.kill(each.process_id, signal.SIGKILL)
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        for each in self._family():
            with suppress(ProcessLookupError):
                os.kill(each.process_id, number)

    def _family(self) -> list["_Process"]:
        """The program and all that descend from it. Servers put processes into groups and sessions of their own."""
        children: dict[int, list[_Process]] = {}
        family: list[_Process] = []
        for each in _all_processes():
            children.setdefault(each.parent_id, []).append(each)
            if each.process_id == self._process.pid:
                family.append(each)
        for each in family:  # grows while it is gone through
            family += children.get(each.process_id, ())
        return family


class _Process(NamedTuple):
    """A process as /proc of Linux has it."""

    process_id: int
    parent_id: int
    started: int  # tells it from a later process with the same id
    ticks: int  # of processor time


def _all_processes() -> list[_Process]:
    """The processes that run now, but for those that have ended and wait to be looked at."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold anything: what counts comes after it.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if fields[0] != "Z":
            ticks = int(fields[11]) + int(fields[12])
            found.append(_Process(int(path.parent.name), int(fields[1]), int(fields[19]), ticks))
    return found


@contextmanager
def server_process(
    command: Sequence[str], url: str, directory: Path, environment: Mapping[str, str]
) -> Iterator[ServerProcess]:
    """A server for as long as the block runs; not yet ready when the block begins. Raises ServerDidNotStart."""
    process = ServerProcess(command, url, directory, environment)
    try:
        yield process
    finally:
        process.stop()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
