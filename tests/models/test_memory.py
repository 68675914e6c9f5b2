"""Free memory by made-up files of the kernel, as machines and containers of both control group versions have them."""

from pathlib import Path

import pytest

from models.memory import available_host_bytes
from tests.made_up_root import root_with

MIB = 2**20
MACHINE = {"proc/meminfo": f"MemTotal: {2000 * 1024} kB\nMemAvailable:    {1000 * 1024} kB\n"}


def second_version(folder: str, limit: str, in_use: int = 300, file_pages: int = 100) -> dict[str, str]:
    """Sizes in MiB."""
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{in_use * MIB}\n",
        f"{folder}/memory.stat": f"anon 5\nactive_file {(file_pages - 40) * MIB}\ninactive_file {40 * MIB}\n",
    }


def first_version(folder: str, limit: int) -> dict[str, str]:
    """300 MiB in use, 100 of them file pages; the group's own numbers leave out those below it."""
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{300 * MIB}\n",
        f"{folder}/memory.stat": "active_file 0\ninactive_file 0\n"
        f"total_active_file {60 * MIB}\ntotal_inactive_file {40 * MIB}\n",
    }


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 1000),
        ({"proc/self/cgroup": "0::/\n"}, 1000),
        ({"proc/self/cgroup": "0::/\n", **second_version("sys/fs/cgroup", "max")}, 1000),
        ({"proc/self/cgroup": "0::/\n", **second_version("sys/fs/cgroup", str(512 * MIB))}, 312),
        ({"proc/self/cgroup": "0::/\n", **second_version("sys/fs/cgroup", str(9000 * MIB))}, 1000),
        ({"proc/self/cgroup": "0::/\n", **second_version("sys/fs/cgroup", str(64 * MIB))}, 0),
        (
            {
                "proc/self/cgroup": "0::/a.slice/b.service\n",
                **second_version("sys/fs/cgroup/a.slice", str(400 * MIB)),
                **second_version("sys/fs/cgroup/a.slice/b.service", str(700 * MIB)),
            },
            200,
        ),
        ({"proc/self/cgroup": "4:memory:/docker/x\n", **first_version("sys/fs/cgroup/memory", 512 * MIB)}, 312),
        ({"proc/self/cgroup": "4:memory:/x\n", **first_version("sys/fs/cgroup/memory/x", 9223372036854771712)}, 1000),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n0::/\n",
                **first_version("sys/fs/cgroup/memory/x", 500 * MIB),
                **first_version("sys/fs/cgroup/memory", 9223372036854771712),
            },
            300,
        ),
    ],
)
def test_available_memory(files: dict[str, str], available: int, tmp_path: Path) -> None:
    assert available_host_bytes(root_with(tmp_path, {**MACHINE, **files})) == available * MIB
