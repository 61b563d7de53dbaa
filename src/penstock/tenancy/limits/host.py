"""The limiter of a host, served to the other gateway processes there over a Unix socket.

It owns nothing but connections: the limits are a `LocalLimiter`. A lease is the connection. When a process dies the
kernel closes its socket, and all it held is settled at once with what it last reported; one that hangs is cut off after
`LEASE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from penstock.tenancy.limits.journal import SlotJournal
from penstock.tenancy.limits.limiter import LocalLimiter
from penstock.tenancy.limits.quota import Refusal
from penstock.tenancy.limits.tenant_limits import Reservation
from penstock.tenancy.limits.wire import (
    Ask,
    Frames,
    Granted,
    Progress,
    Refused,
    Release,
    Reserve,
    Restore,
    Settle,
    Told,
    decode_asks,
    frame,
)

LEASE_S = 8.0


class HostLock:
    """The lock of the serving process as long as it lives; the kernel lets go of it whatever the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> bool:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Guest(asyncio.Protocol):
    """One connected process and what it holds."""

    def __init__(self, limiter: LocalLimiter, guests: set[Guest], clock: Callable[[], float]) -> None:
        self._limiter = limiter
        self._guests = guests
        self._clock = clock
        self._frames = Frames()
        self._held: dict[int, Reservation] = {}
        self.heard_at = self._clock()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # not by birth: uvloop has its own
        self._guests.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guests.discard(self)
        for held in self._held.values():
            self._limiter.settle(held, held.used)
        self._held.clear()

    def hand_over(self) -> None:
        """Close without settling: the guest goes on, and the next host has in the journal what it reserved."""
        self._held.clear()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._clock()
        told: list[Told] = []
        try:
            for body in self._frames.feed(data):
                for ask in decode_asks(body):
                    self._answer(ask, told)
        except ValueError:  # msgspec's errors too: whoever this is, it is not one of us
            self.transport.abort()
            return
        if told:
            self.transport.write(frame(told))

    def _answer(self, ask: Ask, told: list[Told]) -> None:
        if isinstance(ask, Reserve):
            answer = self._limiter.reserve(ask.tenant, ask.quota, ask.tokens, caller=ask.caller)
            if isinstance(answer, Refusal):
                told.append(Refused(ask.id, answer))
            else:
                self._held[ask.id] = answer
                told.append(Granted(ask.id))
        elif isinstance(ask, Restore):
            self._held[ask.id] = held = self._limiter.restore(ask.tenant, ask.quota, ask.tokens)
            held.used = ask.used
        elif isinstance(ask, Progress):
            if (open_one := self._held.get(ask.id)) is not None:
                open_one.used = ask.used
        elif isinstance(ask, Settle):
            if (ended := self._held.pop(ask.id, None)) is not None:
                self._limiter.settle(ended, ask.used)
        elif isinstance(ask, Release) and (never_ran := self._held.pop(ask.id, None)) is not None:
            self._limiter.release(never_ran)


def _clear(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


async def serve(path: Path, journal: SlotJournal, limiter: LocalLimiter, clock: Callable[[], float]) -> None:
    """Serves until cancelled. The lock is held, so a socket file there is a dead host's. The directory guards it."""
    guests: set[Guest] = set()
    _clear(path)
    server = await asyncio.get_running_loop().create_unix_server(lambda: Guest(limiter, guests, clock), str(path))
    try:
        while True:
            journal.trim(limiter.slots())
            for guest in [guest for guest in guests if clock() - guest.heard_at > LEASE_S]:
                guest.transport.abort()
            await asyncio.sleep(1.0)
    finally:
        server.close()
        for guest in list(guests):
            guest.hand_over()
