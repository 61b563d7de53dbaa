"""Number of cores this process may use: those that it is bound to, and no more than its container's CPU limit."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def usable_cores() -> int:
    """Number, at least one. A limit of 1.5 counts as two: threads that wait for each other share what there is."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(bound, cpu_limit())))


def cpu_limit(root: Path = Path("/")) -> float:
    """Cores' worth of time that control groups grant this process; infinite where there is no limit."""
    return min((quota / period for quota, period in _limits(root) if quota > 0 and period > 0), default=math.inf)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(quota, period) of every group that has one, in both versions of control groups."""
    mounted = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _along(mounted, path, _second_version)
            elif "cpu" in controllers.split(","):
                yield from _along(mounted / "cpu", path, _first_version)


def _along(mounted: Path, path: str, read: Callable[[Path], tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Limits from the process's group up to the root: in a container the group's own path may not be there."""
    group = mounted / path.strip("/")
    for each in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            yield read(each)
        if each == mounted:
            return


def _second_version(group: Path) -> tuple[int, int]:
    quota, period = (group / "cpu.max").read_text().split()
    return (0 if quota == "max" else int(quota)), int(period)


def _first_version(group: Path) -> tuple[int, int]:
    return int((group / "cpu.cfs_quota_us").read_text()), int((group / "cpu.cfs_period_us").read_text())
