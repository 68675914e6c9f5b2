"""A real `octavo serve` in a process of its own, for tests that are its clients. Knows no test."""

import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class ServerProcess:
    """Started by `with`; ready inside; sent SIGTERM at the end."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        ready_within: float = 120.0,
        python: str = sys.executable,
        key: str | None = None,
    ) -> None:
        """Serve `model` with more command-line flags, on a free port, in the environment of `python`.

        `key` opens it, where the flags name keys.
        """
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready_within = ready_within
        command = "from server.cli import main; raise SystemExit(main())"
        self.arguments = [python, "-c", command, "serve", "--model", str(model), "--port", str(self.port)]
        self.arguments += flags

    def __enter__(self) -> "ServerProcess":
        """Start and wait until it is ready."""
        self._log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(self.arguments, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + self._ready_within
        while not self.is_ready():
            assert self.process.poll() is None, f"the server ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"the server is not ready:\n{self.log()}"
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        """Take it down."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    def is_ready(self) -> bool:
        """What /health/ready says."""
        try:
            return httpx.get(f"{self.url}/health/ready", headers=self._headers, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        """All that it printed."""
        self._log.seek(0)
        return self._log.read()

    def metric(self, name: str) -> float:
        """The sum of a Prometheus series over its labels."""
        text = httpx.get(f"{self.url}/metrics", headers=self._headers, timeout=10).text
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, flags=re.MULTILINE)
        assert values, f"no series {name}"
        return sum(float(value) for value in values)

    def engine_process_id(self) -> int:
        """The engine process, which is the server's child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        [engine] = [
            int(child) for child in children if b"server.engine_process" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        return engine

    def memory_bytes(self) -> int:
        """Resident memory of the server and its engine."""
        total = 0
        for process_id in (self.process.pid, self.engine_process_id()):
            status = Path(f"/proc/{process_id}/status").read_text()
            total += int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024
        return total


def wait_until(condition, seconds: float = 30.0) -> None:
    """Poll until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
