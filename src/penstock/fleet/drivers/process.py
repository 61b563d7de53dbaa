"""A process that outlives whoever started it, and is found again by a later starter: one directory, one process.

The process holds a file lock that it inherited, from before its first instruction until its end, however it ends. So a
starter that died at any moment leaves no doubt whether the process runs, and nobody starts it twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from penstock.core.private_files import make_private, open_private

_LOOK_S = 0.05
_KILL_S = 5.0  # for a process that was told twice to end
_TAIL_BYTES = 2000
_FORGOTTEN_S = 10.0  # how long a process may take to appear in /proc by its command line


class Child(Protocol):
    """A process that was spawned and is reaped by whoever spawned it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...


class Spawn(Protocol):
    """Starts `python -m MODULE ARGUMENTS`; `engine_process.spawn.spawn` forks it from a template."""

    async def __call__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        stdout: int,
        stderr: int,
        new_session: bool,
        outlives: bool,
    ) -> Child: ...


async def execute(
    module: str,
    arguments: Sequence[str],
    *,
    pass_fds: Sequence[int],
    env: Mapping[str, str],
    stdout: int,
    stderr: int,
    new_session: bool,
    outlives: bool,
) -> Child:
    """A new interpreter, which goes on when this process has ended."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        env=dict(env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=new_session,
        pass_fds=pass_fds,
    )


class ManagedProcess:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._child: Child | None = None  # if this process started it

    @property
    def log_path(self) -> Path:
        return self.directory / "log"

    @property
    def has_begun(self) -> bool:
        return (self.directory / "begun").exists()

    @property
    def is_running(self) -> bool:
        try:
            with open(self.directory / "lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    async def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        spawn: Spawn = execute,
    ) -> bool:
        """Starts `python -m MODULE ARGUMENTS` unless that was done before, by whomever. Returns whether this call did.
        One that has ended is not started again. The arguments must name the directory."""
        make_private(self.directory)
        with open_private(self.directory / "lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if self.has_begun:
                return False
            (self.directory / "begun").touch()
            with open_private(self.log_path, "ab") as log:
                self._child = await spawn(
                    module,
                    arguments,
                    env=environment,
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                    pass_fds=[lock.fileno()],
                    new_session=True,
                    outlives=True,
                )
        return True

    @property
    def pid(self) -> int | None:
        """The process that leads its session; None: none runs, or it cannot be seen yet."""
        if self._child is not None:
            return self._child.pid if self._child.returncode is None else None
        return _find(str(self.directory)) if self.is_running else None

    async def stop(self, grace_s: float) -> None:
        """Ends the process and its children, and removes the directory. One that does not run is no error."""
        await self._signal(signal.SIGTERM, _FORGOTTEN_S)
        if not await self._ends_within(grace_s):
            await self._signal(signal.SIGTERM, 0.0)
            if not await self._ends_within(_KILL_S):
                self.kill()
                await self._ends_within(_KILL_S)
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """The whole session: what the process started, too."""
        if (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The last line of its log."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except FileNotFoundError:
            return ""
        return lines[-1].strip() if lines else ""

    async def _signal(self, number: signal.Signals, patience_s: float) -> None:
        """Sends a signal to the process. One that was forked a moment ago may not have its command line yet."""
        until_s = asyncio.get_running_loop().time() + patience_s
        while self.is_running:
            if (pid := self.pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                return
            if asyncio.get_running_loop().time() > until_s:
                return
            await asyncio.sleep(_LOOK_S)

    async def _ends_within(self, seconds: float) -> bool:
        until_s = asyncio.get_running_loop().time() + seconds
        while self.is_running:
            if asyncio.get_running_loop().time() >= until_s:
                return False
            await asyncio.sleep(_LOOK_S)
        return True


def _find(named: str) -> int | None:
    """The session leader whose command line names this."""
    wanted = named.encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(entry.name)
            if wanted in (entry / "cmdline").read_bytes() and os.getsid(pid) == pid:
                return pid
    return None
