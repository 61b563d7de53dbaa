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
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.core.private_files import make_private, open_private

_LOOK_S = 0.05
_KILL_S = 5.0  # for a process that was told twice to end
_TAIL_BYTES = 2000
_FORGOTTEN_S = 10.0  # how long a process may take to appear in /proc by its command line


class ManagedProcess:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._child: subprocess.Popen[bytes] | None = None  # if this process started it: it must be reaped

    @property
    def log_path(self) -> Path:
        return self.directory / "log"

    @property
    def has_begun(self) -> bool:
        return (self.directory / "begun").exists()

    @property
    def is_running(self) -> bool:
        if self._child is not None:
            self._child.poll()
        try:
            with open(self.directory / "lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        pass_fds: Sequence[int] = (),
        before_exec: Callable[[], None] | None = None,
    ) -> bool:
        """Starts the process unless it was started before, by whomever. Returns whether this call did. One that has
        ended is not started again. The command line must name the directory."""
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
                self._child = subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=[lock.fileno(), *pass_fds],
                    preexec_fn=before_exec,
                )
        return True

    @property
    def pid(self) -> int | None:
        """The process that leads its session; None: none runs, or it cannot be seen yet."""
        if self._child is not None:
            return self._child.pid if self._child.poll() is None else None
        return _find(str(self.directory)) if self.is_running else None

    async def stop(self, grace_s: float) -> None:
        """Ends the process and its children, and removes the directory. One that does not run is no error."""
        await self._signal(signal.SIGTERM, _FORGOTTEN_S)
        if not await self._ends_within(grace_s):
            await self._signal(signal.SIGTERM, 0.0)
            if not await self._ends_within(_KILL_S):
                self.kill()
                await self._ends_within(_KILL_S)
        if self._child is not None:
            self._child.poll()
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
