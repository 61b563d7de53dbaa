"""How often the kernel has killed a process here for its memory: of this process's control group, or of the machine."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))


def count_memory_kills(counters: tuple[Path, ...] = _COUNTERS) -> int:
    """Since whenever; 0 where the kernel does not say. Only a difference means anything."""
    for counter in counters:
        try:
            lines = counter.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
