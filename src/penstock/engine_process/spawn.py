"""Processes of penstock that are started: forked from a template where there is one, executed where there is none.

    with TemplateProcess.start(modules, directory):              # once; it imports meanwhile
        process = await spawn("penstock.cli.main", ["engine", …], pass_fds=[3])
        …                                                        # as with asyncio.subprocess.Process:
        process.terminate()                                      # pid, returncode, send_signal, terminate, kill
        status = await process.wait()

A started process has the environment that this one has at that moment, unless it is given another, and dies with it:
it gets a SIGTERM when this process ends, however it ends, unless it is to outlive it. Processes that it starts in turn
come from the same template (`TEMPLATE_VARIABLE`). A template that does not answer, refuses or has died costs a warning
and the time of an import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.link.forking import (
    ANSWER_S,
    MAX_PACKET,
    TEMPLATE_VARIABLE,
    UNKNOWN_STATUS,
    CannotForkError,
    Ended,
    Spawn,
    ask,
)
from penstock.link.parent_death import named_parent

log = logging.getLogger("penstock")
_ended_decoder = msgspec.json.Decoder(Ended)


class ChildProcess(Protocol):
    """Common interface of `asyncio.subprocess.Process` and a forked process."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, number: int) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ForkedProcess:
    """A process of the template. Signals go by its pidfd, so that none reaches another that was given its number."""

    def __init__(self, pid: int, pidfd: int, lifeline: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._ending = asyncio.get_running_loop().create_task(self._watch(lifeline, connection))

    async def wait(self) -> int:
        return await asyncio.shield(self._ending)

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError where the process has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def _watch(self, lifeline: int, connection: socket.socket) -> int:
        try:
            await _readable(connection)
            packet = connection.recv(MAX_PACKET)
            if packet:
                self.returncode = _ended_decoder.decode(packet).status
            else:  # the template has died, and its process goes on
                await _readable(self._pidfd)
                self.returncode = UNKNOWN_STATUS
            return self.returncode
        finally:
            connection.close()
            os.close(self._pidfd)
            os.close(lifeline)


class TemplateProcess:
    """The template process, and the socket by which it is asked."""

    @classmethod
    @contextlib.contextmanager
    def start(cls, modules: Iterable[str], directory: Path) -> Iterator[TemplateProcess | None]:
        """A template that imports these modules, for all that is spawned from here on, and its end. None: this system
        cannot fork safely, or nobody wants it. `directory` is this user's alone."""
        if sys.platform != "linux" or os.environ.get(TEMPLATE_VARIABLE) == "off":
            yield None
            return
        path = directory / "template"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen()
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.engine_process.template", str(listener.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
                env=os.environ | named_parent(),
            )
        before = os.environ.get(TEMPLATE_VARIABLE)
        os.environ[TEMPLATE_VARIABLE] = str(path)
        try:
            yield cls(process)
        finally:
            os.environ.pop(TEMPLATE_VARIABLE, None)
            if before is not None:
                os.environ[TEMPLATE_VARIABLE] = before
            process.kill()
            process.wait()

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid


async def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    new_session: bool = False,
    outlives: bool = False,
) -> ChildProcess:
    """`python -m MODULE ARGUMENTS`, forked if possible. Descriptors keep their numbers; `stdout` and `stderr` are
    descriptors, or `subprocess.DEVNULL`. `env`: in place of this process's own. `new_session`: for one that is
    executed; one that is forked always has its own. `outlives`: it goes on when this process has ended."""
    environment = dict(os.environ if env is None else env)
    path = os.environ.get(TEMPLATE_VARIABLE, "off")
    if path != "off":
        request = Spawn(module, list(arguments), environment, os.getcwd(), [0, 1, 2, *pass_fds])
        try:
            return await _fork(path, request, [*_standard(stdout, stderr), *pass_fds], outlives=outlives)
        except (OSError, TimeoutError, CannotForkError) as error:
            log.warning("no process can be forked from the template, so one is executed: %s", error or "no answer")
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        env=environment if outlives else environment | named_parent(),
        stdout=stdout,
        stderr=stderr,
        start_new_session=new_session,
        pass_fds=pass_fds,
    )


async def _fork(path: str, request: Spawn, descriptors: Sequence[int], *, outlives: bool) -> ForkedProcess:
    asked = ask(path, request, descriptors, outlives=outlives)
    try:
        await asyncio.wait_for(_readable(asked.connection), ANSWER_S)
        pid, pidfd = asked.answer()
    except BaseException:
        asked.close()
        raise
    return ForkedProcess(pid, pidfd, asked.lifeline, asked.connection)


def _standard(stdout: int | None, stderr: int | None) -> list[int]:
    return [subprocess.DEVNULL, 1 if stdout is None else stdout, 2 if stderr is None else stderr]


async def _readable(source: socket.socket | int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(source, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(source)
