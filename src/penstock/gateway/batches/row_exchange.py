"""One try of one row: an exchange without a client, whose answer and whose charge come together."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from msgspec.structs import replace

from penstock.gateway.responses.exchange import BackgroundExchange
from penstock.http.message import Request
from penstock.tenancy.usage import Usage

_JSON = {b"content-type": b"application/json"}
_RETRY_AFTER = b"retry-after:"


class Answer(NamedTuple):
    status: int
    body: bytes
    usage: Usage | None  # None: nobody worked for it
    retry_after_s: float


class RowTry:
    """Is told the usage of its request in place of the ledger, so that it is charged when, and only when, its result is
    written."""

    def __init__(self, path: str, body: bytes, key: tuple[str, str]) -> None:
        request = Request(b"POST", path.encode(), dict(_JSON), body)
        self.exchange = RowExchange(request, key, self._ended)
        self._usages: list[Usage] = []
        self._is_closed = asyncio.Event()
        self._answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def record(self, usage: Usage) -> None:
        self._usages.append(usage)
        if usage.requests:  # the last part
            self._is_closed.set()

    def _ended(self, _: BackgroundExchange, status: int, body: bytes) -> None:
        if not self._answer.done():
            self._answer.set_result((status, body))

    async def answer(self, usage_id: str) -> Answer:
        """What came of it, with its charge under this name. One who is cancelled meanwhile gives up the work."""
        try:
            status, body = await self._answer
            if status == 200:
                await self._is_closed.wait()  # what was answered is charged in the same moment, or a little later
            return Answer(status, body, self._sum(usage_id), self.exchange.retry_after_s)
        except asyncio.CancelledError:
            self.exchange.cancel()
            raise

    def _sum(self, usage_id: str) -> Usage | None:
        """All parts as one."""
        if not self._usages:
            return None
        usages, last = self._usages, self._usages[-1]
        return replace(
            last,
            request_id=usage_id,
            input_tokens=sum(one.input_tokens for one in usages),
            cached_tokens=sum(one.cached_tokens for one in usages),
            output_tokens=sum(one.output_tokens for one in usages),
            cost_nanos=sum(one.cost_nanos for one in usages),
            device_us=sum(one.device_us for one in usages),
            kv_block_ms=sum(one.kv_block_ms for one in usages),
            requests=1,
        )


class RowExchange(BackgroundExchange):
    __slots__ = ("retry_after_s",)

    retry_after_s: float

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        found = next((line for line in headers.lower().split(b"\r\n") if line.startswith(_RETRY_AFTER)), b"")
        said = found.removeprefix(_RETRY_AFTER).strip()
        self.retry_after_s = float(said) if said.isdigit() and len(said) < 7 else 0.0
        super().start(status, headers, length=length, data=data, is_last=is_last)
