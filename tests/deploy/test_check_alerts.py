"""What check_alerts.py decides and finds by itself; the rest of it needs a server and a Prometheus, for minutes."""

import os
import subprocess
import sys

import pytest

from deploy.prometheus.check_alerts import Outcome, descendants, engine_process, seconds_until, table_of
from tests.deploy.test_prometheus_rules import ALERTS

RIGHT = Outcome("OctavoEngineStalled", "SIGSTOP", 61.0, "SIGCONT", 15.0, "")


@pytest.mark.parametrize(
    ("outcome", "is_right"),
    [
        (RIGHT, True),
        (Outcome("OctavoEngineRestarted", "SIGKILL", 5.0, "", None, ""), True),  # is not waited for
        (Outcome("OctavoEngineStalled", "SIGSTOP", None, "SIGCONT", 0.0, ""), False),
        (Outcome("OctavoEngineStalled", "SIGSTOP", 61.0, "SIGCONT", None, ""), False),
        (Outcome("OctavoEngineStalled", "SIGSTOP", 61.0, "SIGCONT", 15.0, "OctavoDown"), False),
    ],
)
def test_an_alert_is_right_if_it_fires_alone_and_resolves(outcome, is_right):
    assert outcome.is_right == is_right
    assert table_of([outcome]).row_count == 1


def test_alerts_that_are_waited_for_exist():
    names = {alert["alert"] for alert in ALERTS}
    assert {"OctavoEngineStalled", "OctavoEngineRestarted"} <= names


async def test_waiting_ends_when_it_is_so_or_after_its_patience():
    async def yes():
        return True

    async def no():
        return False

    assert await seconds_until(yes, 60) is not None
    assert await seconds_until(no, -1) is None


def test_processes_of_processes_are_found():
    """The engine is a child of the server, which is a child of the check."""
    child = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()']).pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        grandchild = int(process.stdout.readline())
        found = set(descendants(os.getpid()))
        process.communicate("\n\n")
    assert {process.pid, grandchild} <= found
    assert os.getpid() not in found
    assert os.getppid() not in found


def test_a_missing_engine_is_said():
    with pytest.raises(LookupError, match="no engine process"):
        engine_process()
