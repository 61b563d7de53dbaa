"""Memory of this machine that is free, and of the container around this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def free_host_bytes() -> int:
    """Bytes of host memory that can still be taken."""
    return min(_free_on_machine(), _free_in_container())


def _free_on_machine() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    limit, used = _lines(cgroup / "memory.max"), _lines(cgroup / "memory.current")
    if not limit or not used or limit[0] == "max":
        return sys.maxsize
    return max(0, int(limit[0]) - int(used[0]))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
