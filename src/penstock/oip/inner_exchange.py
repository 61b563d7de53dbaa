"""A request that is asked inside the process: an exchange without a connection, and a mailbox for its answer.

The answer waits in a mailbox. A full mailbox tells the application to pause, as a slow client does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

from penstock.api import relay
from penstock.core.errors import EngineFailed, InvalidRequest
from penstock.http.exchange import NOBODY, Exchange, NoChannel
from penstock.http.message import Request, by_name
from penstock.http.server import App

_FULL_BYTES = 64 << 10
_EMPTY_BYTES = 16 << 10  # at which the application may go on
_OF_THE_CALL = frozenset(  # headers about the body and the connection of the call itself
    (
        b"accept-encoding", b"content-length", b"content-type", b"expect", b"inference-header-content-length",
        b"te", b"transfer-encoding",
    )
)  # fmt: skip
_OF_GATEWAYS = (relay.HEADER.lower().encode(), relay.WHOLE_HEADER.lower().encode())
_JSON_TYPE = b"application/json"


class Caller(NamedTuple):
    """The one who asks: headers by lower-case name, and an address."""

    headers: Mapping[bytes, bytes]
    peer: str = NOBODY

    def request(self, method: bytes, target: bytes, body: bytes = b"") -> Request:
        """A request in this caller's name. Raises InvalidRequest for what only answers of /v1 can be."""
        for name in _OF_GATEWAYS:
            if name in self.headers:
                raise InvalidRequest(f"{name.decode()} is not for this protocol", param=name.decode())
        headers = {name: value for name, value in self.headers.items() if name not in _OF_THE_CALL}
        if body:
            headers |= {b"content-type": _JSON_TYPE, b"content-length": b"%d" % len(body)}
        return Request(method, target, headers, body)


class Head(NamedTuple):
    status: int
    headers: dict[bytes, bytes]  # by lower-case name


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class InnerExchange(Exchange):
    """Answered by an application; `head`, then `parts`, wait for what it says. The asker calls `lost` in the end, which
    changes nothing where the answer is complete."""

    __slots__ = ("_changed", "_head", "_is_broken", "_is_complete", "_is_paused", "_num_bytes", "_parts")

    def __init__(self, request: Request, peer: str) -> None:
        super().__init__(NoChannel(peer), request, False, False)
        self._changed = asyncio.Event()
        self._head: Head | None = None
        self._parts: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_paused = self._is_complete = self._is_broken = False

    # -- the application's side

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        if not self.is_open:
            return
        assert not self.is_started, "an exchange is answered once"
        self.is_started = True
        self._head = Head(status, by_name(headers))
        self.write(data, is_last)

    def write(self, data: bytes, is_last: bool = False) -> None:
        if not self.is_open:
            return
        if data:
            self._parts.append(data)
            self._num_bytes += len(data)
        if is_last:
            self._is_complete = True
            self._over()
        elif self._num_bytes > _FULL_BYTES and not self._is_paused and self.watcher is not None:
            self._is_paused = True
            self.watcher.pause()
        self._changed.set()

    def abort(self) -> None:
        super().abort()
        self._is_broken = not self._is_complete
        self._changed.set()

    # -- the caller's side

    @property
    def answer(self) -> Answer | None:
        """All of an answer that was given at once."""
        if self._head is None or not self._is_complete:
            return None
        return Answer(*self._head, b"".join(self._parts))

    async def head(self) -> Head:
        while self._head is None:
            await self._change()
        return self._head

    async def parts(self) -> AsyncIterator[bytes]:
        """All that has come, as it comes. Raises EngineFailed where the answer breaks off."""
        while True:
            if self._parts:
                data = b"".join(self._parts)
                self._parts.clear()
                self._num_bytes = 0
                yield data
                if self._is_paused and self._num_bytes < _EMPTY_BYTES:
                    self._is_paused = False
                    if self.watcher is not None:
                        self.watcher.resume()
            elif self._is_complete:
                return
            else:
                await self._change()

    async def whole(self) -> Answer:
        status, headers = await self.head()
        return Answer(status, headers, b"".join([part async for part in self.parts()]))

    async def _change(self) -> None:
        if self._is_broken:
            raise EngineFailed("the answer broke off")
        self._changed.clear()
        await self._changed.wait()


async def ask(app: App, caller: Caller, method: bytes, target: bytes) -> Answer:
    """The whole answer of the application to a request without a body."""
    exchange = InnerExchange(caller.request(method, target), caller.peer)
    try:
        app(exchange)
        return await exchange.whole()
    finally:
        exchange.lost()
