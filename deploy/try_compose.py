"""Starts deploy/compose.yaml for real, as a project of its own, and looks whether all of it is there: `try_compose.py`.

The server with keys, what Prometheus scrapes and evaluates, Grafana's board, the end. Prints a table; ends with 1 if a
check fails, with 2 where Docker Compose is missing. Works with Docker, and with podman's socket as DOCKER_HOST.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the repository's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.server_process import free_port

FOLDER = Path(__file__).resolve().parent
ADMIN_KEY, KEY = "key-of-the-one-who-watches", "key-of-a-team"
PROJECT = "octavo-try"
_READY_SECONDS = 300.0


class Failed(RuntimeError):
    """A check did not find what it should; the message says what it found."""


@dataclass(frozen=True, slots=True)
class Project:
    """What runs, by the names of the services."""

    urls: dict[str, str]
    compose: Callable[..., str]

    def get(self, service: str, path: str, key: str | None = None) -> httpx.Response:
        """Ask a service."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.get(self.urls[service] + path, headers=headers, timeout=30, trust_env=False)

    def wait_for(self, what: str, condition: Callable[[], bool]) -> float:
        """Seconds until it is so. Raises Failed."""
        begin = time.monotonic()
        while True:
            try:
                if condition():
                    return time.monotonic() - begin
            except httpx.HTTPError:
                pass  # it does not listen yet
            if time.monotonic() - begin > _READY_SECONDS:
                raise Failed(f"not within {_READY_SECONDS:.0f} s: {what}")
            time.sleep(1)


def command() -> list[str] | None:
    """Docker Compose, as a program of its own or as a part of `docker`."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:  # noqa: S603
        return [docker, "compose"]
    return None


def override_for(model: Path) -> dict[str, object]:
    """A second compose file: a model of this machine in place of one that is downloaded."""
    server = {
        "environment": [f"OCTAVO_MODEL=/models/{model.name}", "OCTAVO_SERVED_MODEL_NAME=smollm2"],
        "volumes": [f"{model.resolve()}:/models/{model.name}:ro"],
    }
    return {"services": {"octavo": server}}


@contextmanager
def running(program: Sequence[str], services: Sequence[str], model: Path | None) -> Iterator[Project]:
    """The services, until they are taken down with their volumes. Raises Failed."""
    ports = {service: free_port() for service in ("octavo", "prometheus", "grafana")}
    listen = {f"{service.upper()}_LISTEN": f"127.0.0.1:{port}" for service, port in ports.items()}
    environment = {**os.environ, **listen, "OCTAVO_API_KEY": f"team:{KEY}", "OCTAVO_ADMIN_API_KEY": ADMIN_KEY}
    with tempfile.TemporaryDirectory() as name:
        files = [FOLDER / "compose.yaml"]
        if model is not None:
            files.append(Path(name) / "model.yaml")
            files[-1].write_text(yaml.safe_dump(override_for(model)), encoding="utf-8")
        options = ["--project-name", PROJECT, *(part for file in files for part in ("--file", str(file)))]

        def compose(*arguments: str) -> str:
            done = subprocess.run(  # noqa: S603
                [*program, *options, *arguments], env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise Failed(f"compose {arguments[0]}: {done.stderr.strip()[-1000:]}")
            return done.stdout

        try:
            compose("up", "--detach", *services)
            yield Project({service: f"http://127.0.0.1:{ports[service]}" for service in services}, compose)
        finally:
            compose("down", "--volumes")


# --- the checks: each returns what it saw, and raises Failed ---


def octavo(project: Project) -> str:
    """It is ready, and answers those who have a key."""
    seconds = project.wait_for("/health/ready", lambda: project.get("octavo", "/health/ready", KEY).status_code == 200)
    refused = project.get("octavo", "/v1/models").status_code
    model = project.get("octavo", "/v1/models", KEY).json()["data"][0]["id"]
    answer = httpx.post(
        f"{project.urls['octavo']}/v1/completions",
        json={"model": model, "prompt": "The capital of France is", "max_tokens": 4},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=120,
        trust_env=False,
    )
    if refused != 401 or answer.status_code != 200:
        raise Failed(f"{refused} without a key, then {answer.status_code} {answer.text}")
    return f"ready after {seconds:.0f} s; 401 without a key; says {answer.json()['choices'][0]['text']!r}"


def prometheus(project: Project) -> str:
    """It scrapes the server, with the admin key, and evaluates every rule."""

    def scrapes() -> bool:
        targets = project.get("prometheus", "/api/v1/targets").json()["data"]["activeTargets"]
        return any(target["labels"]["job"] == "octavo" and target["health"] == "up" for target in targets)

    seconds = project.wait_for("Prometheus has the target octavo, and it is up", scrapes)
    groups = yaml.safe_load((FOLDER / "prometheus/rules.yml").read_text(encoding="utf-8"))["groups"]
    expected = sum(len(group["rules"]) for group in groups)

    def evaluates() -> bool:
        found = project.get("prometheus", "/api/v1/rules").json()["data"]["groups"]
        return sum(rule["health"] == "ok" for group in found for rule in group["rules"]) == expected

    project.wait_for(f"{expected} rules are evaluated", evaluates)
    return f"octavo is up after {seconds:.0f} s; {expected} rules are evaluated"


def grafana(project: Project) -> str:
    """Whoever comes sees the board, which can ask Prometheus."""

    def has_board() -> bool:
        return bool(project.get("grafana", "/api/search?type=dash-db").json())

    seconds = project.wait_for("Grafana has the board", has_board)
    [board] = project.get("grafana", "/api/search?type=dash-db").json()
    answer = project.get("grafana", "/api/datasources/proxy/uid/prometheus/api/v1/query?query=octavo_engine_ready")
    if answer.status_code != 200 or not answer.json()["data"]["result"]:
        raise Failed(f"the data source answers {answer.status_code} {answer.text[:500]}")
    return f"{board['title']} after {seconds:.0f} s, without a login; its data source answers"


def checked(project: Project) -> list[tuple[str, bool, str]]:
    """A row for each service: its name, whether it is right, and what was seen."""
    rows = []
    for check in (octavo, prometheus, grafana):
        if check.__name__ in project.urls:
            try:
                rows.append((check.__name__, True, check(project)))
            except (Failed, httpx.HTTPError, ValueError) as failure:
                rows.append((check.__name__, False, str(failure)))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", default="octavo,prometheus,grafana", help="which (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a .gguf file of this machine, in place of a download")
    options = parser.parse_args(arguments)
    program = command()
    if program is None:
        print("Not checked: there is no Docker Compose.", file=sys.stderr)
        return 2
    try:
        with running(program, options.services.split(","), options.model) as project:
            rows = checked(project)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    table = Table("Service", "Result", "What was seen")
    for name, is_right, seen in rows:
        table.add_row(name, "ok" if is_right else "wrong", seen)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0 if all(is_right for _, is_right, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
