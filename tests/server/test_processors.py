"""Quotas of control groups, read from made-up file systems as Docker, systemd and Kubernetes have them."""

import os
from pathlib import Path

import pytest

from server.config import engine_environment
from server.processors import openmp_defaults, processor_quota
from tests.made_up_root import root_with


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/a.slice/b.service\n",
                "sys/fs/cgroup/a.slice/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/a.slice/b.service/cpu.max": "400000 100000\n",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
    ],
)
def test_quota(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert processor_quota(root_with(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("quota", "num_processors", "num_siblings", "threads"),
    [
        (2.0, 64, 1, "2"),
        (2.9, 64, 1, "2"),
        (0.5, 64, 1, "1"),
        (48.0, 64, 2, "32"),  # what two threads of one core share
        (64.0, 64, 1, None),
        (None, 64, 1, None),
    ],
)
def test_threads_of_a_quota(
    quota: float | None,
    num_processors: int,
    num_siblings: int,
    threads: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_processors)))
    limit = "max" if quota is None else str(int(quota * 100_000))
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{limit} 100000\n"}
    for number in range(num_processors):
        first = number - number % num_siblings
        topology = f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        files[topology] = f"{first}-{first + num_siblings - 1}\n"
    assert openmp_defaults(root_with(tmp_path, files)) == ({} if threads is None else {"OMP_NUM_THREADS": threads})


def test_what_the_user_sets_goes_before_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.config.openmp_defaults", lambda: {"OMP_NUM_THREADS": "3"})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert engine_environment()["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert engine_environment()["OMP_NUM_THREADS"] == "5"
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # as deployment files pass what is not set
    assert engine_environment()["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr("server.config.openmp_defaults", dict)
    assert "OMP_NUM_THREADS" not in engine_environment()
