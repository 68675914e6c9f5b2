"""A server is held still, measured and stopped with every process it started, those in sessions of their own too."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.server_process import ServerDidNotStart, server_process

# Prints its child's id; the child, in a session of its own, computes for ever.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline, "waited for half a minute in vain"
        time.sleep(0.01)


def state(process_id: int) -> str:
    """One letter, such as R (runs) or T (held still); empty: it has ended."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_the_whole_family_is_held_still_measured_and_stopped():
    with server_process([sys.executable, "-S", "-c", PARENT], "", Path.cwd(), {}) as process:
        wait_for(lambda: process.printed().endswith("\n"))
        child = int(process.printed())
        begin = process.processor_seconds()
        wait_for(lambda: process.processor_seconds() >= begin + 0.05)  # the child's: the parent sleeps
        process.pause()
        wait_for(lambda: state(child) == "T")
        held = process.processor_seconds()
        time.sleep(0.1)
        assert process.processor_seconds() == held
        process.resume()
        wait_for(lambda: state(child) == "R")
        process.pause()  # what is held still is stopped all the same
    assert not process.is_running()
    wait_for(lambda: state(child) in ("", "Z"))


def test_a_program_that_is_not_there_says_so():
    with (
        pytest.raises(ServerDidNotStart, match="no-such-program cannot be run"),
        server_process(["no-such-program"], "", Path.cwd(), {}),
    ):
        pass


def test_the_end_of_a_long_log_is_kept():
    command = [sys.executable, "-S", "-c", "print('x' * 9000, 'the reason', sep='\\n')"]
    with server_process(command, "http://127.0.0.1:9", Path.cwd(), {}) as process:
        wait_for(lambda: not process.is_running())
        with pytest.raises(ServerDidNotStart, match=r"x\nthe reason\n$"):
            process.wait_until_ready("/", 30, {})


def test_the_environment_is_added_to():
    command = [sys.executable, "-S", "-c", "import os; print(os.environ['ADDED'], 'PATH' in os.environ)"]
    with server_process(command, "", Path.cwd(), {"ADDED": "yes"}) as process:
        wait_for(lambda: not process.is_running())
        assert process.printed() == "yes True\n"
