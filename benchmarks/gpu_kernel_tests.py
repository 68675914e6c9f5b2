"""Runs the kernels' own tests on the card, compiled, where they otherwise run under Triton's interpreter.

In child processes of pytest, several where pytest-xdist is installed, since most of the time is compilation. Tests that
do not end in time are stopped, and those that did are counted. Part "kernel tests" of benchmarks/gpu_check.sh;
tests/kernels/on_card.py brings the launches to the card.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_part import Part, Values, run_part
from benchmarks.gpu_results import NOTE, SKIPPED
from benchmarks.machine import ROOT

FOLDER = "tests/kernels"
SMALL_TESTS = f"{FOLDER}/test_block_writes.py::test_write_of_a_packed_product"
NEEDED = ("pytest", "hypothesis")
MAX_PROCESSES = 12  # each takes its own context on the card
MAX_NAMED = 20  # failed tests
STOPPED = "stopped before the end"
OUTCOMES = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}
WORD = f"(?P<word>{'|'.join(OUTCOMES)})"
# pytest's line of one test: "file.py::test PASSED [ 7%]", or of several processes "[gw0] [ 7%] PASSED file.py::test".
ALONE = re.compile(rf"(?P<test>\S+\.py::.*?) {WORD}(?: \(.*\))?\s*\[ *\d+%\]")
WITH_OTHERS = re.compile(rf"\[gw\d+\] \[ *\d+%\] {WORD} (?P<test>\S+\.py::.*?)\s*")


def measure(part: Part) -> None:
    """Run the tests, or say what is missing for them."""
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        part.record(SKIPPED, {NOTE: f"not installed: {', '.join(missing)}"})
        return
    part.check("pytest", lambda: run_tests([SMALL_TESTS] if part.is_small else _files(), part.seconds_left))


def _files() -> list[str]:
    """Those with tests of Triton kernels; others may need what a card's machine lacks, the CPU library for one."""
    from tests.interpreted import interpreted_files

    return [str(path) for path in interpreted_files() if path.parent == ROOT / FOLDER]


def run_tests(tests: Sequence[str], seconds: float | None) -> tuple[bool, Values]:
    """Whether all of them passed, and the counts; not all have if they were stopped, after so many seconds."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.kernels.on_card", "-p", "no:cacheprovider"]
    # The folder's own conftest alone: those above it need the server's packages. One line for each test, none twice.
    command += [f"--confcutdir={FOLDER}", "--verbosity=1", "-rN", "-W", "ignore", *_in_parallel(), *tests]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        status = run_in_session(command, log, seconds)
        text = log.read_text(encoding="utf-8", errors="replace")
    print(text[-20_000:], flush=True)
    found = outcomes(text)
    counts = Counter(found.values())
    failed = [test.rpartition("/")[2] for test, outcome in found.items() if outcome == "failed"]
    values: dict[str, object] = {outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")}
    if failed:
        values["failures"] = ", ".join(failed[:MAX_NAMED])
    if status is None:
        values[NOTE] = STOPPED
    elif status != 0 and not failed:  # not a test, but what is around them
        values[NOTE] = f"pytest ended with {status}: {text.strip()[-300:]}"
    return status == 0 and counts["passed"] > 0, values


def run_in_session(command: Sequence[str], log: Path, seconds: float | None) -> int | None:
    """Run a command with its output in a file; it and all that it started end with this call, or with this process.

    Returns:
        Its exit status; None if it was stopped, after so many seconds.
    """

    def end(_signal: int, _frame: object) -> None:  # as a signal alone would, but past the `finally` below
        sys.exit(128 + signal.SIGTERM)

    # The oracles run on the CPU, in as many processes as there are cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    before = signal.signal(signal.SIGTERM, end)
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        signal.signal(signal.SIGTERM, before)


def _in_parallel() -> list[str]:
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(MAX_PROCESSES, len(os.sched_getaffinity(0))))]


def outcomes(text: str) -> dict[str, str]:
    """What became of each test that pytest's output tells of, the last word on each: a value of OUTCOMES."""
    lines = (ALONE.fullmatch(line) or WITH_OTHERS.fullmatch(line) for line in text.splitlines())
    return {line["test"]: OUTCOMES[line["word"]] for line in lines if line}


def main(argv: list[str] | None = None) -> int:
    """Run the part."""
    return run_part("kernel tests", "The kernels' own tests, compiled.", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
