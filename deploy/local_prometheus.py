"""Runs a real Prometheus that scrapes one server and evaluates deploy/prometheus/rules.yml while a check needs it.

Knows Prometheus's HTTP API, and no series by name.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server_process import free_port, server_process

RULES = Path(__file__).resolve().parent / "prometheus" / "rules.yml"
_START_SECONDS = 60.0
_QUERY_SECONDS = 30.0


class PrometheusMissing(RuntimeError):
    """There is no program `prometheus` here."""


class QueryRefused(RuntimeError):
    """Prometheus did not understand a query, or could not answer it; the message is its own."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an answer, as of now."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """Asks one that runs."""

    def __init__(self, url: str) -> None:
        """`url` is that of its API."""
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=_QUERY_SECONDS)

    def query(self, expression: str) -> list[Sample]:
        """The series that an expression gives now, or its number as one without labels. Raises QueryRefused."""
        data = self._ask("/api/v1/query", query=expression)
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        return [Sample(series["metric"], float(series["value"][1])) for series in data["result"]]

    def alerts(self) -> list[dict[str, Any]]:
        """What is pending or fires now: `state` and `labels` of each."""
        alerts: list[dict[str, Any]] = self._ask("/api/v1/alerts")["alerts"]
        return alerts

    def close(self) -> None:
        """Ask no more."""
        self._client.close()

    def _ask(self, path: str, **fields: str) -> dict[str, Any]:
        answer = self._client.post(path, data=fields) if fields else self._client.get(path)
        content: dict[str, Any] = answer.json()
        if content["status"] != "success":
            raise QueryRefused(content["error"])
        data: dict[str, Any] = content["data"]
        return data


@contextmanager
def local_prometheus(
    target: str, *, key: str | None = None, scrape_seconds: float = 1.0, rules: Sequence[Path] = (RULES,)
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` (host:port) as the job `octavo` and forgets everything at the end.

    `key` is what /metrics of the server wants.

    Raises:
        PrometheusMissing: it is not installed.
        ServerDidNotStart: with what it printed.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise PrometheusMissing("there is no `prometheus` on the PATH; Debian has it in the package of that name")
    with tempfile.TemporaryDirectory(prefix="octavo-prometheus-") as name:
        folder = Path(name)
        config = folder / "prometheus.yml"
        config.write_text(json.dumps(_config(target, key, scrape_seconds, rules)))  # JSON is YAML
        port = free_port()
        command = [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        with server_process(command, f"http://127.0.0.1:{port}", folder, {}) as process:
            process.wait_until_ready("/-/ready", _START_SECONDS, {})
            prometheus = Prometheus(process.url)
            try:
                yield prometheus
            finally:
                prometheus.close()


def _config(target: str, key: str | None, scrape_seconds: float, rules: Sequence[Path]) -> dict[str, object]:
    interval = f"{round(scrape_seconds * 1000)}ms"
    scraped: dict[str, object] = {"job_name": "octavo", "static_configs": [{"targets": [target]}]}
    if key is not None:
        scraped["authorization"] = {"credentials": key}
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [scraped],
    }
