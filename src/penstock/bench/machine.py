"""Figures from Linux of this machine and of a process and its descendants. Elsewhere, and across machines: None."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"


@dataclass(frozen=True)
class Usage:
    cpu_s: float
    rss_bytes: int


@dataclass(frozen=True)
class _Process:
    parent: int
    usage: Usage


def cpu_name() -> str:
    for line in _lines(PROC / "cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_s() -> float | None:
    """CPU seconds that anybody has used since boot."""
    for line in _lines(PROC / "stat"):
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return None


def listening_pid(port: int) -> int | None:
    """The process that listens on a TCP port of this machine; the oldest, where a server hands its socket on."""
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening_inodes(table, port)}
    return min((pid for pid in _pids() if sockets & _open_files(pid)), default=None)


def tree_usage(pid: int) -> Usage:
    """The sum over a process and its descendants. Pages that they share count once for each."""
    processes = {pid: process for pid in _pids() if (process := _read_process(pid))}
    tree = {pid}
    while grown := {child for child, process in processes.items() if process.parent in tree} - tree:
        tree |= grown
    usages = [processes[member].usage for member in tree if member in processes]
    return Usage(sum(usage.cpu_s for usage in usages), sum(usage.rss_bytes for usage in usages))


def _pids() -> list[int]:
    return [int(entry.name) for entry in PROC.glob("[0-9]*")]


def _read_process(pid: int) -> _Process | None:
    try:
        # The name, in parentheses, may hold anything; the fields after it are numbers.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return _Process(parent=int(fields[1]), usage=Usage(cpu_s, int(fields[21]) * os.sysconf("SC_PAGE_SIZE")))


def _listening_inodes(table: str, port: int) -> list[str]:
    rows = [line.split() for line in _lines(PROC / "net" / table)[1:]]
    return [row[9] for row in rows if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port]


def _open_files(pid: int) -> set[str]:
    files = set()
    with suppress(OSError):  # it has just ended, or is not ours to see
        for entry in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):  # it has just closed this one
                files.add(os.readlink(entry))
    return files


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
