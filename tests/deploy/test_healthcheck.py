"""The image's health check against a stand-in server, and its reading of settings against the server's own."""

import importlib.util
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from server.cli import _build_parsers, _flags_of
from server.config import load_settings
from server.middleware import HEALTH_PATHS

SCRIPT = Path(__file__).parents[2] / "deploy" / "healthcheck.py"
SPEC = importlib.util.spec_from_file_location("healthcheck", SCRIPT)
healthcheck = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(healthcheck)


class StandIn(ThreadingHTTPServer):
    """Answers as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.status, self.body = 200, b'{"status":"ready"}'
        self.asked: list[str] = []


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stand_in():
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check(*arguments: str, **variables: str) -> tuple[int, str]:
    """Run the script as the image does, with these variables and no others."""
    done = subprocess.run(
        [sys.executable, "-I", SCRIPT, *arguments], env=variables, capture_output=True, text=True, timeout=30
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def test_a_ready_server_is_healthy(stand_in):
    assert check(OCTAVO_PORT=str(stand_in.server_port)) == (0, "ready")
    assert check("--live", OCTAVO_PORT=str(stand_in.server_port), OCTAVO_HOST="0.0.0.0") == (0, "ready")
    assert stand_in.asked == ["/health/ready", "/health/live"]


def test_what_it_asks_for_needs_no_key():
    assert {healthcheck.READY_PATH, healthcheck.LIVE_PATH} <= HEALTH_PATHS


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (503, b'{"status":"loading"}', "/health/ready answered 503: loading"),
        (503, b'{"status":"draining"}', "/health/ready answered 503: draining"),
        (500, b"<html>", "/health/ready answered 500"),
        (404, b"[1]", "/health/ready answered 404"),
    ],
)
def test_what_is_not_ready_is_told(stand_in, status, body, said):
    stand_in.status, stand_in.body = status, body
    assert check(OCTAVO_PORT=str(stand_in.server_port)) == (1, said)


def test_a_server_that_is_not_there_is_unhealthy(stand_in):
    port = stand_in.server_port
    stand_in.server_close()
    code, said = check(OCTAVO_PORT=str(port))
    assert code == 1
    assert said.startswith("not answered:")


def test_a_port_that_is_taken_at_random_is_told():
    code, said = check(OCTAVO_PORT="0")
    assert code == 1
    assert "OCTAVO_PORT" in said


def test_wrong_usage_is_told():
    assert check("--alive")[0] == 2


FLAGS = [
    (),
    ("--port", "9001"),
    ("--port=9001", "--host", "0.0.0.0"),
    ("--host", "::"),
    ("--api-key=alice:flag-key", "--max-num-seqs", "4"),
    ("--config", "FILE"),
    ("--config=FILE", "--port", "9001"),
    ("--port", "9001", "--host", "127.0.0.3", "--port", "9004"),
]
VARIABLES = [
    {},
    {"OCTAVO_PORT": "9002", "OCTAVO_HOST": "::1"},
    {"OCTAVO_HOST": "0.0.0.0", "OCTAVO_PORT": ""},
    {"OCTAVO_PORT": "tcp://10.0.0.1:8000"},
    {"OCTAVO_CONFIG": "FILE", "OCTAVO_PORT": "9002"},
    {"octavo_port": "9005"},
]
FILES = [
    'port = 9003\nhost = "127.0.0.2"\n',
    "max_num_seqs = 4\n",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("flags", FLAGS)
def test_it_reads_settings_as_the_server_does(flags, variables, file, tmp_path, monkeypatch):
    path = tmp_path / "octavo.toml"
    path.write_text(file)
    flags = [flag.replace("FILE", str(path)) for flag in flags]
    variables = {name: value.replace("FILE", str(path)) for name, value in variables.items()}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = healthcheck.settings_of(["/opt/octavo/bin/python", "/opt/octavo/bin/octavo", "serve", *flags], variables)
    settings = load_settings(parsed_flags(flags))
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    assert healthcheck.address_of(found) == (host, settings.port)


def parsed_flags(flags):
    """As the command line reads them."""
    from argparse import ArgumentParser

    from pydantic_settings import CliSettingsSource

    from server.cli import _add_argument
    from server.config import Settings

    parser, serve_parser = _build_parsers()
    source = CliSettingsSource[ArgumentParser](Settings, root_parser=serve_parser, add_argument_method=_add_argument)
    return _flags_of(source, parser.parse_args(["serve", *flags]))
