"""Cores that a process may use: a container's limit counts, in both versions of control groups."""

import math
from pathlib import Path

import pytest

from penstock.core.cores import cpu_limit, usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/kubepods/pod1/box\n",
                "sys/fs/cgroup/kubepods/pod1/box/cpu.max": "max 100000\n",
                "sys/fs/cgroup/kubepods/pod1/cpu.max": "400000 100000\n",
            },
            4.0,
        ),
        ({"proc/self/cgroup": "0::/not/mounted/here\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
        ({"proc/self/cgroup": "nonsense\n"}, math.inf),
    ],
)
def test_limit_is_the_least_of_the_groups(tmp_path: Path, files: dict[str, str], limit: float) -> None:
    assert cpu_limit(write(tmp_path, files)) == limit


def test_there_is_a_core() -> None:
    assert usable_cores() >= 1
