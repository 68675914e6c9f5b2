"""The file that all parts of the check of a card write to, as JSON and as Markdown; parts may run at the same time.

    python benchmarks/gpu_results.py FILE [--note PART TEXT | --skipped PART TEXT]

prints how the results stand against the goals, or notes what the script that runs the parts has to say of one that
failed, or could not run here. Needs neither torch nor a card.
"""

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_goals import goal_rows, to_markdown
from benchmarks.machine import RESULTS_DIR, machine_facts, write_result, write_whole

QUESTION = "are the kernels right on this card, and how near do they and the whole engine come to its limits"
NOTE = "note"  # the measurement under which a note stands, and the key of what is no error
SKIPPED = "skipped"  # the measurement of a part that could not run here
ERROR = "error"  # the key of a measurement that failed
RIGHT = "right"  # the key of a check

Result = dict[str, Any]


@contextmanager
def updated(path: Path) -> Iterator[Result]:
    """The results, to be changed; written when the block ends. One process at a time."""
    with _locked(path.parent):
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else _new_result()
        yield result
        write_result(path, result)
        write_whole(path.with_suffix(".md"), to_markdown(result))


def default_path() -> Path:
    """gpu-<date>.json in $OUT, or among the results."""
    folder = Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS_DIR
    return folder / f"gpu-{datetime.now(UTC):%Y-%m-%d}.json"


def errors(result: Result) -> list[str]:
    """Measurements that failed and checks that found something wrong."""
    return [
        f"{part}: {measurement}"
        for part, measurements in result["parts"].items()
        for measurement, values in measurements.items()
        if ERROR in values or values.get(RIGHT) is False
    ]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time. Locks the folder itself: a file in it is replaced, and one made to be locked stays."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _new_result() -> Result:
    versions = {"triton": _version("triton"), "transformers": _version("transformers")}
    return {
        "question": QUESTION,
        "commands": {},
        "machine": machine_facts() | versions,
        "card": {"name": "no part has run"},
        "parts": {},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main(argv: list[str] | None = None) -> int:
    """Note what there is to note, or print the goals and the errors; 1 if there are errors."""
    parser = argparse.ArgumentParser(description="Print how the results stand against the goals.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--note", nargs=2, metavar=("PART", "TEXT"), help="what went wrong with a part")
    parser.add_argument("--skipped", nargs=2, metavar=("PART", "TEXT"), help="why a part cannot run here: no error")
    options = parser.parse_args(argv)
    with updated(options.file) as result:
        if options.note:
            part, text = options.note
            result["parts"].setdefault(part, {})[NOTE] = {ERROR: text}
            return 0
        if options.skipped:
            part, text = options.skipped
            result["parts"].setdefault(part, {})[SKIPPED] = {NOTE: text}
            return 0
    if result.get("dry_run"):
        print("A dry run on a CPU: the numbers mean nothing.")
    for goal, bound, value, verdict in goal_rows(result):
        print(f"{goal:<58} {bound:>8} {value:>8}  {verdict}")
    for error in errors(result):
        print(f"wrong or failed: {error}")
    return 1 if errors(result) else 0


if __name__ == "__main__":
    sys.exit(main())
