"""Count of the kernel's kills of processes here for their memory: in this control group, or on the machine."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))


def count_memory_kills(counters: tuple[Path, ...] = _COUNTERS) -> int:
    """Number of kills since some start; 0 where the kernel does not say. Only a difference means anything."""
    for counter in counters:
        try:
            lines = counter.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
