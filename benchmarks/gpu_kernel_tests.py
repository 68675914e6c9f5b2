"""Runs the kernels' own tests on the card, compiled, where they otherwise run under Triton's interpreter.

In child processes of pytest, several where pytest-xdist is installed, since most of the time is compilation. Part
"kernel tests" of benchmarks/gpu_check.sh; tests/kernels/on_card.py brings the launches to the card.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_part import Part, Values, run_part
from benchmarks.machine import ROOT

FOLDER = "tests/kernels"
SMALL_TESTS = f"{FOLDER}/test_block_writes.py::test_write_of_a_packed_product"
NEEDED = ("pytest", "hypothesis")
MAX_PROCESSES = 12  # each takes its own context on the card
MAX_NAMED = 20  # failed tests


def measure(part: Part) -> None:
    """Run the tests, or say what is missing for them."""
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        part.record("skipped", {"note": f"not installed: {', '.join(missing)}"})
        return
    part.check("pytest", lambda: _run([SMALL_TESTS] if part.is_small else _files()))


def _files() -> list[str]:
    """Those with tests of Triton kernels; others may need what a card's machine lacks, the CPU library for one."""
    from tests.interpreted import interpreted_files

    return [str(path) for path in interpreted_files() if path.parent == ROOT / FOLDER]


def _run(tests: list[str]) -> tuple[bool, Values]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "tests.kernels.on_card", "-p", "no:cacheprovider"]
        # The folder's own conftest alone: those above it need the server's packages.
        command += [f"--confcutdir={FOLDER}", f"--junitxml={report}", "-W", "ignore", *_in_parallel(), *tests]
        # The oracles run on the CPU, in as many processes as there are cores.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        print(done.stdout[-20_000:], done.stderr[-5_000:], sep="\n", flush=True)
        if not report.exists():
            return False, {"exit_status": done.returncode, "note": done.stderr.strip()[-300:]}
        outcomes = list(_outcomes(report))
    counts = Counter(outcome for _, outcome in outcomes)
    failed = [name for name, outcome in outcomes if outcome == "failed"]
    values = {"passed": counts["passed"], "failed": counts["failed"], "skipped": counts["skipped"]}
    if failed:
        values["failures"] = ", ".join(failed[:MAX_NAMED])
    return counts["passed"] > 0 and done.returncode == 0, values


def _in_parallel() -> list[str]:
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(MAX_PROCESSES, len(os.sched_getaffinity(0))))]


def _outcomes(report: Path) -> Iterator[tuple[str, str]]:
    """The name of each test, and "passed", "failed" or "skipped"."""
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag for child in case}
        outcome = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        yield f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}", outcome


def main(argv: list[str] | None = None) -> int:
    """Run the part."""
    return run_part("kernel tests", "The kernels' own tests, compiled.", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
