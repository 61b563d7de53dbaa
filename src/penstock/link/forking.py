"""Asking the template process for a fork: what is said, and the descriptors that go along.

The template itself is `engine_process/template.py`, which tells what each packet means. This side knows its socket by a
variable, and runs on an event loop (`engine_process/spawn.py`) or without one (`ForkedProcess`, for ranks).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

TEMPLATE_VARIABLE = "PENSTOCK_TEMPLATE"  # the template's socket; "off": there is to be none
MAX_PACKET = 128 << 10  # a socket takes no larger one, by default
ANSWER_S = 60.0  # for imports from a slow disk; a template that ends is noticed at once
UNKNOWN_STATUS = 255  # as asyncio has it for a process that another one reaped


class Spawn(msgspec.Struct, frozen=True):
    module: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    places: list[int]  # the number that each of the passed descriptors is to have
    last_signal: int = signal.SIGTERM  # when the lifeline is cut


class Spawned(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


_answer_decoder = msgspec.json.Decoder(Spawned | Refused)


class Ended(msgspec.Struct, frozen=True, tag=True):
    status: int


_ended_decoder = msgspec.json.Decoder(Ended)


class CannotForkError(Exception):
    pass


@dataclass(frozen=True)
class Asked:
    """A request that the template has, and the answer that is to come."""

    connection: socket.socket
    lifeline: int

    def answer(self) -> tuple[int, int]:
        """The process's id and its pidfd, once the connection can be read. Raises CannotForkError."""
        packet, received, _, _ = socket.recv_fds(self.connection, MAX_PACKET, 1)
        if not packet:
            raise CannotForkError("it has ended")
        answer = _answer_decoder.decode(packet)
        if isinstance(answer, Refused):
            raise CannotForkError(answer.reason)
        return answer.pid, received[0]

    def close(self) -> None:
        self.connection.close()
        os.close(self.lifeline)


def ask(path: str, request: Spawn, descriptors: Sequence[int], *, outlives: bool = False) -> Asked:
    """`descriptors` may be `subprocess.DEVNULL`. `outlives`: the process has no lifeline. Raises OSError."""
    with contextlib.ExitStack() as undone:
        connection = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.setblocking(False)
        connection.connect(path)
        read_end, lifeline = os.pipe()
        undone.callback(os.close, lifeline)
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            passed = [nothing if descriptor == subprocess.DEVNULL else descriptor for descriptor in descriptors]
            passed += [] if outlives else [read_end]
            socket.send_fds(connection, [msgspec.json.encode(request)], passed)
        finally:
            os.close(nothing)
            os.close(read_end)
        undone.pop_all()
        return Asked(connection, lifeline)


class ForkedProcess:
    """A process of the template, for threads: as much of `subprocess.Popen` as ranks need. It ends with this object."""

    def __init__(self, path: str, request: Spawn, descriptors: Sequence[int]) -> None:
        """Raises OSError or CannotForkError."""
        asked = ask(path, request, descriptors)
        try:
            if not _is_readable(asked.connection.fileno(), ANSWER_S):
                raise CannotForkError("no answer")
            self.pid, self._pidfd = asked.answer()
        except BaseException:
            asked.close()
            raise
        self._connection = asked.connection
        weakref.finalize(self, _close, asked, self._pidfd).atexit = False  # threads may be waiting for it until then

    def poll(self) -> int | None:
        return self._status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        status = self._status(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _status(self, timeout_s: float | None) -> int | None:
        """None: it runs. The template's word is left where it is, for other threads to read too."""
        if not _is_readable(self._connection.fileno(), timeout_s):
            return None
        if packet := self._connection.recv(MAX_PACKET, socket.MSG_PEEK):
            return _ended_decoder.decode(packet).status
        return UNKNOWN_STATUS if _is_readable(self._pidfd, timeout_s) else None  # the template has died


def _close(asked: Asked, pidfd: int) -> None:
    asked.close()
    os.close(pidfd)


def _is_readable(descriptor: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))
