"""A long answer to one client, written no faster than the client reads."""

from __future__ import annotations

import asyncio

from penstock.http.exchange import Exchange


class ClientStream:
    """The exchange's watcher."""

    def __init__(self, exchange: Exchange, headers: bytes, length: int) -> None:
        self._exchange = exchange
        self._head = (headers, length)
        self._may_write = asyncio.Event()
        self._may_write.set()
        exchange.watcher = self

    async def write(self, data: bytes) -> bool:
        """False: the client has gone."""
        await self._may_write.wait()
        if not self._exchange.is_open:
            return False
        self._begin()
        self._exchange.write(data)
        return True

    def close(self) -> None:
        self._exchange.watcher = None
        if self._exchange.is_open:
            self._begin()
            self._exchange.write(b"", is_last=True)

    def _begin(self) -> None:
        if not self._exchange.is_started:
            headers, length = self._head
            self._exchange.start(200, headers, length=length)

    def client_gone(self) -> None:
        self._may_write.set()

    def pause(self) -> None:
        self._may_write.clear()

    def resume(self) -> None:
        self._may_write.set()
