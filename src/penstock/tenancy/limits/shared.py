"""One limiter for all gateway processes of a host. The first to get a lock serves it; the others ask it over a socket.

The limits live in the memory of the serving process. When that process dies, the kernel frees the lock, another takes
it within a tenth of a second, and the rest connect to it and tell it what they hold. What the dead one had admitted is
in its journal, so the windows go on as they were. What was open then counts with all that it reserved until it leaves
the window. What the dead process had open no longer counts as open; times told before a take-over are forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import cast

from penstock.observe.background import Worker, outliving
from penstock.tenancy.limits.host import HostLock, serve
from penstock.tenancy.limits.journal import SlotJournal
from penstock.tenancy.limits.limiter import Answer, Held, LocalLimiter
from penstock.tenancy.limits.quota import US, Quota, Reason, Refusal
from penstock.tenancy.limits.tenant_limits import Reservation
from penstock.tenancy.limits.wire import (
    Ask,
    Beat,
    Frames,
    Granted,
    Progress,
    Refused,
    Release,
    Reserve,
    Restore,
    Settle,
    decode_told,
    frame,
)

_NAME = "limiter"
_FILES = "limits-2"  # another number where processes of two versions would not understand each other
BEAT_S = 2.0
RETRY_S = 0.1
PATIENCE_S = 3.0  # how long a request may wait while the host changes


class RemoteReservation:
    """A reservation from the host's limiter, or, once this process has become the host, from its own."""

    __slots__ = ("id", "local", "quota", "tenant", "tokens", "used")

    def __init__(self, id: int, tenant: str, quota: Quota, tokens: int) -> None:
        self.id = id
        self.tenant = tenant
        self.quota = quota
        self.tokens = tokens
        self.used = 0
        self.local: Reservation | None = None


class _Pending:
    __slots__ = ("answer", "ask", "asked_at")

    def __init__(self, ask: Reserve, answer: asyncio.Future[Answer], asked_at: float) -> None:
        self.ask = ask
        self.answer = answer
        self.asked_at = asked_at


class SharedLimiter:
    """A `Limiter`. `start` it before use and `close` it; `directory` is the same for all processes of the host."""

    def __init__(
        self, directory: Path, *, retry_quantum_s: float = 1.0, clock: Callable[[], float] = monotonic
    ) -> None:
        self._socket = directory / f"{_FILES}.sock"
        self._lock = HostLock(directory / f"{_FILES}.lock")
        self._journal = SlotJournal(directory / f"{_FILES}.journal")
        self._quantum_s = retry_quantum_s
        self._clock = clock
        self._local: LocalLimiter | None = None  # set while this process is the host
        self._link: _Link | None = None
        self._pending: dict[int, _Pending] = {}
        self._open: dict[int, RemoteReservation] = {}
        self._ids = itertools.count(1)
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: list[Worker] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._stay_in_touch()), asyncio.create_task(self._beat())]
        self._workers = [Worker.of_task(_NAME, task) for task in self._tasks]
        await self._ready.wait()

    async def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._local = None
        self._journal.close()
        self._lock.release()
        self._give_up(older_than=self._clock())

    @property
    def is_host(self) -> bool:
        return self._local is not None

    def reserve(self, tenant: str, quota: Quota, tokens: int, *, caller: int = 0) -> Answer | asyncio.Future[Answer]:
        if self._local is not None:
            return self._local.reserve(tenant, quota, tokens, caller=caller)
        ask = Reserve(next(self._ids), tenant, quota, tokens, caller)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[ask.id] = _Pending(ask, answer, self._clock())
        self._send(ask)
        return answer

    def progress(self, held: Held, used: int) -> None:
        if isinstance(held, RemoteReservation):
            held.used = used
            if held.local is None:
                return self._send(Progress(held.id, used))
            held = held.local
        if self._local is not None:
            self._local.progress(held, used)

    def settle(self, held: Held, used: int) -> None:
        self._end(held, used)

    def release(self, held: Held) -> None:
        self._end(held, None)

    def _end(self, held: Held, used: int | None) -> None:
        if isinstance(held, RemoteReservation):
            if self._open.pop(held.id, None) is None:
                return
            if held.local is None:
                return self._send(Release(held.id) if used is None else Settle(held.id, used))
            held = held.local
        if self._local is not None:
            if used is None:
                self._local.release(held)
            else:
                self._local.settle(held, used)

    def _send(self, ask: Ask) -> None:
        """Sends over the link, if there is one. Nothing is lost: a new one begins with all that is open and waits."""
        if self._link is not None:
            self._link.send(ask)

    async def _stay_in_touch(self) -> None:
        while True:
            with outliving(_NAME):
                if self._local is not None:  # it is the host, and could not serve the others a moment ago
                    await serve(self._socket, self._journal, self._local, self._clock)
                elif self._lock.acquire():
                    await self._be_host()
                else:
                    with contextlib.suppress(OSError):  # nobody serves yet
                        await self._be_guest()
            await asyncio.sleep(RETRY_S)

    async def _be_host(self) -> None:
        slots = self._journal.load(int(self._clock() * US))
        local = LocalLimiter(self._clock, retry_quantum_s=self._quantum_s, slots=slots, note=self._journal.note)
        for held in self._open.values():
            held.local = local.restore(held.tenant, held.quota, held.tokens)
        self._local = local
        for pending in self._pending.values():
            ask = pending.ask
            if not pending.answer.done():
                pending.answer.set_result(local.reserve(ask.tenant, ask.quota, ask.tokens, caller=ask.caller))
        self._pending.clear()
        self._ready.set()
        await serve(self._socket, self._journal, local, self._clock)

    async def _be_guest(self) -> None:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: _Link(self._told), str(self._socket))
        for held in self._open.values():
            link.send(Restore(held.id, held.tenant, held.quota, held.tokens, held.used))
        for pending in self._pending.values():
            link.send(pending.ask)
        self._link = link
        self._ready.set()
        try:
            await link.lost
        finally:
            self._link = None
            link.abort()

    def _told(self, body: bytes) -> None:
        for told in decode_told(body):
            pending = self._pending.pop(told.id, None)
            if pending is None or pending.answer.done():  # it gave up or was cancelled: nobody will settle this one
                if isinstance(told, Granted):
                    self._send(Release(told.id))
            elif isinstance(told, Refused):
                pending.answer.set_result(told.refusal)
            else:
                ask = pending.ask
                held = self._open[ask.id] = RemoteReservation(ask.id, ask.tenant, ask.quota, ask.tokens)
                pending.answer.set_result(held)

    async def _beat(self) -> None:
        while True:
            self._send(Beat())
            for _ in range(8):
                await asyncio.sleep(BEAT_S / 8)
                self._give_up(older_than=self._clock() - PATIENCE_S)

    def _give_up(self, older_than: float) -> None:
        for id, pending in list(self._pending.items()):
            if pending.asked_at > older_than:
                break  # they are in the order in which they asked
            del self._pending[id]
            if not pending.answer.done():
                pending.answer.set_result(Refusal(Reason.UNAVAILABLE, 1.0))


class _Link(asyncio.Protocol):
    """The connection to the host. What is sent within one turn of the loop goes out together."""

    def __init__(self, told: Callable[[bytes], None]) -> None:
        self._told = told
        self._frames = Frames()
        self._batch: list[Ask] = []
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # not by birth: uvloop has its own

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._told(body)

    def send(self, ask: Ask) -> None:
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(ask)

    def abort(self) -> None:
        self._transport.abort()

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if not self._transport.is_closing():  # else the host is gone, and the next one is told what matters
            self._transport.write(frame(batch))
