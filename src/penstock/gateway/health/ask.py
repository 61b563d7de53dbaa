"""One small question to a replica, over the connections that its requests use."""

from __future__ import annotations

import asyncio

from penstock.gateway.http.call import Failure
from penstock.gateway.http.message import ResponseHead
from penstock.gateway.http.upstream import Upstream


class _Question:
    """Receiver of an answer."""

    def __init__(self) -> None:
        self.status: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._status: int | None = None

    def head(self, head: ResponseHead) -> None:
        self._status = head.status

    def data(self, data: bytes, is_last: bool) -> None:
        if is_last and not self.status.done():
            self.status.set_result(self._status)

    def failed(self, failure: Failure) -> None:
        if not self.status.done():
            self.status.set_result(None)


async def ask(
    upstream: Upstream, method: bytes, target: bytes, headers: bytes, body: bytes = b"", *, timeout_s: float
) -> int | None:
    """The status of the answer; None: there was none, or not all of it in time."""
    question = _Question()
    call = upstream.send(method, target, headers, body, question)
    try:
        async with asyncio.timeout(timeout_s):
            return await question.status
    except TimeoutError:
        return None
    finally:
        if question.status.cancelled():
            call.cancel()
