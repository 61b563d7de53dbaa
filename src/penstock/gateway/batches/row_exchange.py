"""One try of one row: an exchange without a client, whose answer and whose charge come together."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from penstock.gateway.records.whole_bill import whole
from penstock.gateway.responses.exchange import BackgroundExchange
from penstock.http import clock as clocks
from penstock.http.clock import TimerClock
from penstock.http.message import Request, by_name
from penstock.tenancy.usage import Usage

_JSON = {b"content-type": b"application/json"}
_CLOSING_S = 30.0

log = logging.getLogger(__name__)


class Answer(NamedTuple):
    status: int
    body: bytes
    usage: Usage | None  # None: it costs nothing
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

    async def answer(self, usage_id: str, clock: TimerClock) -> Answer:
        """The answer, with its charge under this name. Cancelling the wait gives up the work."""
        try:
            status, body = await self._answer
            retry_after_s = self.exchange.retry_after_s
            if status != 200:
                return Answer(status, body, None, retry_after_s)
            try:
                async with clocks.timeout(clock, _CLOSING_S):  # it is charged in the same moment, or a little later
                    await self._is_closed.wait()
            except TimeoutError:
                log.error("%s was answered, and nobody says what it used: it is not charged", usage_id)
            return Answer(status, body, whole(self._usages, usage_id), retry_after_s)
        except asyncio.CancelledError:
            self.exchange.cancel()
            raise


class RowExchange(BackgroundExchange):
    __slots__ = ("retry_after_s",)

    retry_after_s: float

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        said = by_name(headers).get(b"retry-after", b"")
        self.retry_after_s = float(said) if said.isdigit() and len(said) < 7 else 0.0
        super().start(status, headers, length=length, data=data, is_last=is_last)
