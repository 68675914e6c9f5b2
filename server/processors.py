"""How many processors this container may use, as opposed to how many it sees. Reads files of the kernel alone."""

import os
from pathlib import Path

from models.control_groups import control_groups, text_of


def openmp_defaults(root: Path = Path("/")) -> dict[str, str]:
    """The variable that holds OpenMP to the container's quota where that is less than the machine; else nothing.

    A quota, such as that of `docker --cpus`, hides no processor: a thread for each of them would stand still for most
    of every period, and all others wait for it at each barrier.

    Args:
        root: of the file system.
    """
    visible = os.sched_getaffinity(0)
    quota = processor_quota(root)
    if quota is None or quota >= len(visible):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, min(int(quota), _num_cores(root, visible))))}


def processor_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that the control groups of this process allow it; None = all there is."""
    quotas = [quota for folder in control_groups("cpu", root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _quota_of(folder: Path) -> float | None:
    """Of one control group, in version 2 or version 1."""
    fields = text_of(folder / "cpu.max").split()
    if not fields:
        fields = [text_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota, period = (int(field) for field in fields)
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _num_cores(root: Path, processors: set[int]) -> int:
    """Physical cores among these processors: of threads that share one, a second adds next to nothing."""
    files = [
        text_of(root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list") for number in processors
    ]
    return len(set(files)) if all(files) else len(processors)
