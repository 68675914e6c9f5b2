"""How much processor time each process of a server has had, thread by thread, and how often its threads woke up.

From /proc of Linux; nothing needs a privilege. Knows no server and no load.
"""

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Of one process, since its start."""

    seconds: float  # on a core, over all threads
    waited: float  # seconds for which a thread was ready to run and had no core
    num_wakeups: float  # times a thread went to sleep, and so woke up again
    main_seconds: float  # on a core, of the thread that the process began with

    def __sub__(self, earlier: "ProcessorTime") -> "ProcessorTime":
        """From `earlier` to now. Of threads that have ended in between, nothing is left."""
        return ProcessorTime(
            self.seconds - earlier.seconds,
            self.waited - earlier.waited,
            self.num_wakeups - earlier.num_wakeups,
            self.main_seconds - earlier.main_seconds,
        )

    def __truediv__(self, number: int) -> "ProcessorTime":
        """The share of each of so many."""
        return ProcessorTime(
            self.seconds / number, self.waited / number, self.num_wakeups / number, self.main_seconds / number
        )


def processor_time(process_id: int) -> ProcessorTime:
    """As of now. Raises OSError for a process that has ended."""
    seconds = waited = main_seconds = 0.0
    num_wakeups = 0
    for task in (_PROC / str(process_id) / "task").iterdir():
        try:
            ran_ns, waited_ns, _ = map(int, (task / "schedstat").read_text().split())
            status = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has just ended
        seconds += ran_ns / 1e9
        waited += waited_ns / 1e9
        num_wakeups += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        if task.name == str(process_id):
            main_seconds = ran_ns / 1e9
    return ProcessorTime(seconds, waited, num_wakeups, main_seconds)


def child_running(process_id: int, word: str) -> int:
    """The child of a process that has `word` among its arguments. Raises LookupError where there is none."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            arguments = (entry / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == str(process_id) and word in arguments:
            return int(entry.name)
    raise LookupError(f"process {process_id} has no child that runs {word}")
