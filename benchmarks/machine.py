"""What a result must say about where it came from: the machine, the versions and the command; and where it goes.

Knows no benchmark.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from kernels import __version__

ROOT = Path(__file__).resolve().parent.parent
RESULTS_DIR = ROOT / "benchmarks" / "results"
_THREAD_VARIABLES = ("OMP_", "GOMP_", "MKL_")  # how many threads compute, and whether they spin while they wait


def machine_facts() -> dict[str, object]:
    """The machine and the software, as of now. The load says whether others were at work on it."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "thread_variables": {name: value for name, value in os.environ.items() if name.startswith(_THREAD_VARIABLES)},
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "octavo": __version__,
        "commit": _commit(),
    }


def command_line(argv: Sequence[str] = tuple(sys.argv)) -> str:
    """The command that was typed, with the script's path from the root of the repository."""
    script = Path(argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(name), *argv[1:]])


def write_result(path: Path, result: Mapping[str, object]) -> None:
    """Write a result as JSON for people and machines, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replace a file's text all at once: who is stopped meanwhile leaves the old text, never half of the new one."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _cpu_model() -> str:
    """The name, and the numbers that tell generations of one name apart: hypervisors cut names short."""
    fields = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name", platform.processor() or platform.machine())
    if "cpu family" not in fields:
        return name
    return f"{name} (family {fields['cpu family']}, model {fields['model']})"


def _commit() -> str:
    """The short hash, with a mark if files differ from it; "unknown" outside a repository."""
    git = ("git", "-C", str(ROOT))
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changes.stdout.strip() else "")
