"""One part of the check of a card: its command line, its device, and how its measurements are run and written down.

Every number is written as soon as it is known, so that a part that is stopped keeps what it had; a measurement that
fails is noted and costs none of the others. Knows no kernel and no goal; benchmarks/gpu_check.sh runs the parts.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_results import ERROR, RIGHT, default_path, updated
from benchmarks.gpu_timing import Timer, make_timer
from benchmarks.machine import command_line

Values = Mapping[str, object]

WROTE_ERRORS = 3  # exit status: something was wrong, and the results say what. 1 is Python's own, of a crash.


class Part:
    """Measures on one device and writes what it finds into the shared file."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Note in the file what is known of the card, and the command.

        Args:
            options: of `run_part`'s command line.
        """
        self.name: str = options.name
        self.device = torch.device("cpu" if options.dry_run else "cuda:0")
        self.is_small: bool = options.small or options.dry_run  # tiny shapes
        self.num_errors = 0
        self._deadline: float | None = None if options.seconds is None else time.monotonic() + options.seconds
        self._share: tuple[int, int] = options.share
        self._num_measurements = 0
        self._path: Path = options.results
        self._timer: Timer | None = None
        with updated(self._path) as result:
            result["card"] = card_facts(self.device)
            result["dry_run"] = self.is_dry
            result["commands"][self.name] = command_line()
            result["parts"].setdefault(self.name, {})

    @property
    def is_dry(self) -> bool:
        """No card: on the CPU, to run the code and not to measure. Always small."""
        return self.device.type == "cpu"

    @property
    def seconds_left(self) -> float | None:
        """Until the part has to come to its end; None if nobody has set a limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def timer(self) -> Timer:
        """Made when first asked for: its buffers and its warm-up cost time that a part of checks has no use for."""
        if self._timer is None:
            self._timer = make_timer(self.device)
        return self._timer

    def synchronise(self) -> None:
        """Wait for the device."""
        if not self.is_dry:
            torch.cuda.synchronize(self.device)

    def measure(self, measurement: str, run: Callable[[], Values]) -> None:
        """Run one measurement and record its values, or the error that it ended with; nothing if it is not our share.

        Any exception is caught: out of memory, a kernel that does not compile and a bug in one measurement all leave
        the others worth having. The traceback goes to the log.
        """
        place, num_shares = self._share
        self._num_measurements += 1
        if self._num_measurements % num_shares != place % num_shares:
            return
        try:
            values = run()
        except Exception as error:
            self.record_error(measurement, error)
        else:
            self.record(measurement, values)

    def check(self, measurement: str, run: Callable[[], tuple[bool, Values]]) -> None:
        """Like `measure`, of something that is right or wrong: wrong counts as an error."""

        def checked() -> Values:
            is_right, values = run()
            self.num_errors += not is_right
            return {RIGHT: is_right, **values}

        self.measure(measurement, checked)

    def record_error(self, measurement: str, error: Exception) -> None:
        """Write down what was raised, and print where; call it while handling the exception."""
        traceback.print_exc()
        self.num_errors += 1
        self.record(measurement, {ERROR: f"{type(error).__name__}: {error}"[:500]})

    def record(self, measurement: str, values: Values) -> None:
        """Write the values down and print them."""
        with updated(self._path) as result:
            result["parts"][self.name][measurement] = dict(values)
        text = ", ".join(f"{key} {_short(value)}" for key, value in values.items())
        print(f"{self.name} | {measurement}: {text}", flush=True)

    def earlier(self, part: str, measurement: str, key: str) -> float | None:
        """A number that another part has found; None if it did not."""
        with updated(self._path) as result:
            value = result["parts"].get(part, {}).get(measurement, {}).get(key)
        return float(value) if isinstance(value, (int, float)) else None


def run_part(name: str, about: str, measure: Callable[[Part], None], argv: Sequence[str] | None = None) -> int:
    """Read the command line and run the part.

    Returns:
        0; WROTE_ERRORS if anything failed or was wrong and the results say so; 2 without a card.

    Raises:
        Exception: the results could not be opened, or the card not be asked what it is. Python ends with 1.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, under TRITON_INTERPRET=1")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on a card")
    parser.add_argument("--name", default=name, help=f"what to call the part in the results (default: {name})")
    parser.add_argument("--results", type=Path, default=default_path(), help="the JSON file (default: gpu-<date>.json)")
    parser.add_argument("--share", type=_share, default=(1, 1), help="2/4: every fourth measurement from the second on")
    parser.add_argument("--seconds", type=float, help="what the part may take, for one that keeps to it by itself")
    options = parser.parse_args(argv)
    if options.dry_run:
        repair_interpreter()
    elif not torch.cuda.is_available():
        print(f"{name}: torch sees no CUDA device. Use --dry-run to run the code without one.", file=sys.stderr)
        return 2
    part = Part(options)
    try:
        measure(part)
    except Exception as error:  # any, as in Part.measure; what was measured before is written
        part.record_error("part", error)
    return WROTE_ERRORS if part.num_errors else 0


def repair_interpreter() -> None:
    """Give Triton's interpreter the bfloat16 and eight-bit floats of a GPU, for a dry run.

    Raises:
        RuntimeError: the interpreter is not on; it has to be before Triton is imported.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("a dry run needs TRITON_INTERPRET=1 in its environment")
    from tests.kernels import interpreter_repair

    interpreter_repair.install()


def card_facts(device: torch.device) -> dict[str, object]:
    """Name, size and driver of the card; of a dry run only that it was one."""
    if device.type == "cpu":
        return {"name": "none (dry run)"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split("\n")[0].strip() or "unknown"


def _share(text: str) -> tuple[int, int]:
    place, num_shares = (int(part) for part in text.split("/"))
    return place, num_shares


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
