"""`octavo serve` as a process with a socket: start-up, limits below HTTP, and its two ways to end."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest


class Server:
    def __init__(self, *flags: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_with_fake_engine", "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if match := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
                self.port = int(match[1])
                break
        else:
            raise AssertionError(f"it did not come up: {self.lines}")
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        self.client.close()
        _, rest = self.process.communicate(timeout=60)
        self.lines += rest.splitlines()
        return self.process.returncode


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    server = Server(*flags)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def stream(server: Server, num_tokens: int) -> Iterator[str]:
    body = {"prompt": "a", "stream": True, "max_tokens": num_tokens}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        yield from (line.removeprefix("data: ") for line in response.iter_lines() if line)


def wait_until_draining(server: Server) -> None:
    while server.client.get("/health/ready").status_code != 503:
        pass


def test_tells_a_person_what_it_does():
    with serving() as server:
        text = "\n".join(server.lines)
        assert "Loading weights" in text
        assert "serves smollm2" in text
        assert "cpu, float32, fake attention" in text
        assert "64 blocks of 16 tokens (1 MiB)" in text
        assert server.client.get("/health/ready").status_code == 200
        server.signal()
        assert server.end() == 0


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones():
    with serving() as server:
        events = stream(server, 60)
        next(events)
        server.signal()
        wait_until_draining(server)
        refused = server.client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert server.client.get("/health/live").status_code == 200
        *rest, done = events
        assert len(rest) == 59
        assert done == "[DONE]"
        assert server.end() == 0


def test_requests_over_the_shutdown_timeout_end_with_an_error():
    with serving("--shutdown-timeout", "0.1") as server:
        events = stream(server, 200)
        next(events)
        server.signal()
        *_, last = events
        assert json.loads(last)["error"]["code"] == "engine_died"
        assert server.end() == 0


def test_second_signal_ends_at_once():
    with serving("--shutdown-timeout", "3600") as server:
        events = stream(server, 255)
        next(events)
        server.signal()
        wait_until_draining(server)
        server.signal()
        with pytest.raises(httpx.HTTPError):
            assert "[DONE]" not in list(events)
            raise httpx.ReadError("it ended with an error event")
        assert server.end() == 1


def test_port_in_use_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "tests.server.serve_with_fake_engine", "--port", port]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr == f"octavo: Cannot listen on 127.0.0.1 port {port}: Address already in use.\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--api-key-file", "/nowhere/keys"],
            "The file of keys /nowhere/keys cannot be read: No such file or directory.",
        ),
        (["--api-key", "alice:"], "--api-key has an entry (number 1) that is neither a key nor name:key."),
        (["--api-key", "a:x", "--admin-api-key", "x"], "The admin key is also the key of a."),
    ],
)
def test_keys_that_cannot_be_used_end_the_start(flags, sentence):
    command = [sys.executable, "-m", "tests.server.serve_with_fake_engine", "--port", "0", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (2, f"octavo: {sentence}\n")


def test_as_many_connections_as_the_machine_allows(running):
    soft, hard = resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard or soft >= 65536


def read_all(connection: socket.socket) -> bytes:
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


@pytest.fixture(scope="module")
def running():
    with serving() as server:
        yield server


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health/live HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 2_000_000,
        b"GET /" + b"a" * 2_000_000,
        b"GET /health/live HTTP/1.1\r\n" + b"X-Many: 1\r\n" * 200_000,
    ],
)
def test_head_without_end_is_refused(running, head):
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        try:
            connection.sendall(head)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it hung up while we were still sending
        else:
            answer = read_all(connection)
            assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    assert running.client.get("/health/live").status_code == 200


def test_head_just_under_the_limit_is_taken(running):
    response = running.client.get("/health/live", headers={"X-Big": "a" * 60_000})
    assert response.status_code == 200


def test_what_is_not_http_is_answered_in_the_same_shape(running):
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_client_that_closes_its_socket_frees_the_engine(running):
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 255}).encode()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.sendall(head + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    while 'vllm:num_requests_running{engine="0",model_name="smollm2"} 0.0' not in running.client.get("/metrics").text:
        pass
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="smollm2"} 3.0'
    assert aborted in running.client.get("/metrics").text
