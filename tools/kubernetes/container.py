"""A container of a pod without an image: a process in mount, PID and host-name namespaces of its own.

Its root directory is the machine's, with the pod's volumes mounted at their paths. Networks are shared: a pod has a
loopback address of its own instead. The kernel ends everything in the container with its first process, and that one
with the node agent. Users, capabilities and resource limits are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

_LOOK_S = 0.01
_KILLED = 137


class Container:
    def __init__(self, directory: Path, hostname: str, mounts: Mapping[str, Path]) -> None:
        """`mounts`: sources by path in the container."""
        self._directory = directory
        self._script = _script(directory, hostname, mounts)
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False

    async def start(self, command: Sequence[str], environment: Mapping[str, str], workdir: str, log: Path) -> None:
        for name in ("root", "upper", "work"):
            (self._directory / name).mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig", "KILL"),
                *("unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child=KILL"),
                *("sh", "-c", self._script, "container", workdir, *command),
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def wait(self) -> int:
        """Its exit code, as a shell tells it."""
        assert self._process is not None
        code = await self._process.wait()
        return _KILLED if self._is_killed else code if code >= 0 else 128 - code

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def signal(self, number: signal.Signals) -> None:
        """Sends a signal to its first process, as a container runtime does."""
        if (pid := await self._first_pid()) is not None:
            self._is_killed |= number is signal.SIGKILL  # of which `unshare` tells nothing
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def execute(self, command: Sequence[str], timeout_s: float) -> bool:
        """Whether the command, run inside, ends with 0 in time."""
        if (pid := await self._first_pid()) is None:
            return False
        into = ["nsenter", f"--target={pid}", "--mount", "--pid", "--uts", "--root", "--wd", "--"]
        process = await asyncio.create_subprocess_exec(
            *into,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await process.wait() == 0
        except TimeoutError:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _first_pid(self) -> int | None:
        """The machine's number of the container's process 1; None: it has ended."""
        while self.is_running:
            assert self._process is not None
            outer = self._process.pid
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if found := _children(outer):
                    return found[0]
            await asyncio.sleep(_LOOK_S)
        return None


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _script(directory: Path, hostname: str, mounts: Mapping[str, Path]) -> str:
    root = shlex.quote(str(directory / "root"))
    lines = ["set -e", f"R={root}", "mount -t tmpfs tmpfs $R", f"hostname {shlex.quote(hostname[:63])}"]
    lines += [
        "for e in /*; do if [ -L $e ]; then cp -P $e $R$e; elif [ -d $e ]; then mkdir $R$e",
        "if [ $e = /proc ]; then mount -t proc proc $R$e; else mount --rbind $e $R$e; fi; fi; done",
    ]
    overlaid: set[Path] = set()
    for path, source in sorted((Path(os.path.realpath(path)), source) for path, source in mounts.items()):
        parent = next(one for one in (path, *path.parents) if one.exists())
        if parent not in (path, Path("/")) and parent not in overlaid:  # the mount point is made in an overlay
            over = directory / "overlays" / str(len(overlaid))
            overlaid.add(parent)
            upper, work = shlex.quote(f"{over}/upper"), shlex.quote(f"{over}/work")
            lines.append(f"mkdir -p {upper} {work}")
            lines.append(f"mount -t overlay -o lowerdir={parent},upperdir={upper},workdir={work} overlay $R{parent}")
        at, what = f"$R{shlex.quote(str(path))}", shlex.quote(str(source))
        made = f"mkdir -p {at}" if source.is_dir() else f"mkdir -p $(dirname {at}); touch {at}"
        lines += [f"[ -e {at} ] || {{ {made}; }}", f"mount --bind {what} {at}"]
    lines.append('W="$1"; shift; exec chroot $R env -C "$W" "$@"')
    return "\n".join(lines)
