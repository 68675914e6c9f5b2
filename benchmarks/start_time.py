"""How long `octavo serve` takes until it is ready, with nothing kept from earlier starts and with packed weights.

Seconds from the start of the process to the first 200 of /health/ready, the model's file being in the system's cache;
the default model unless --model says otherwise. Writes benchmarks/results/start_time.json.
"""

import argparse
import re
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, ROOT, command_line, machine_facts, write_result
from benchmarks.server_process import ServerDidNotStart, free_port, server_process
from server.model_store import resolve

MOST_SECONDS = 120.0
_POLL_SECONDS = 0.01
_REQUEST = b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Start:
    """One start."""

    ready_seconds: float
    load_seconds: float  # of them, in the engine: from its first import of the model to the end of its loading
    processor_seconds: float  # that all processes took until then


def measured_start(flags: Sequence[str], home: Path) -> Start:
    """Start a server on a free port and wait until it is ready. Raises ServerDidNotStart."""
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), *flags]
    began = time.monotonic()
    with server_process(command, f"http://127.0.0.1:{port}", ROOT, {"OCTAVO_HOME": str(home)}) as process:
        while not _is_ready(port):
            if not process.is_running() or time.monotonic() - began > MOST_SECONDS:
                raise ServerDidNotStart(f"{' '.join(command)} did not get ready:\n{process.printed()}")
            time.sleep(_POLL_SECONDS)
        ready_seconds, processor_seconds = time.monotonic() - began, process.processor_seconds()
        while (said := re.search(r"loaded in ([\d.]+) s", process.printed())) is None:
            time.sleep(_POLL_SECONDS)
    return Start(ready_seconds, float(said[1]), processor_seconds)


def _is_ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(_REQUEST)
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False  # it does not listen yet


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as `octavo serve` takes it")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each kind, in turns")
    parser.add_argument("--output", type=Path, default=RESULTS_DIR / "start_time.json")
    arguments = parser.parse_args(argv)
    path = resolve(arguments.model)
    model = ("--model", str(path))
    starts: dict[str, list[Start]] = {"nothing kept": [], "packed weights kept": [], "--quantization none": []}
    try:
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as home:
                starts["nothing kept"].append(measured_start(model, Path(home)))
                starts["packed weights kept"].append(measured_start(model, Path(home)))
                starts["--quantization none"].append(measured_start((*model, "--quantization", "none"), Path(home)))
    except ServerDidNotStart as error:
        print(error, file=sys.stderr)
        return 1
    medians = {
        kind: {name: round(median(asdict(start)[name] for start in each), 2) for name in Start.__slots__}
        for kind, each in starts.items()
    }
    table = Table("start", "ready, s", "of it loading, s", "processor time, s", title=f"{path.name}, medians")
    for kind, values in medians.items():
        table.add_row(kind, *(f"{values[name]:.2f}" for name in Start.__slots__))
    Console().print(table)
    result = {"command": command_line(), "machine": machine_facts(), "model": path.name, "medians": medians}
    write_result(
        arguments.output, result | {"starts": {kind: [asdict(s) for s in each] for kind, each in starts.items()}}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
