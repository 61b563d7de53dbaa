"""One document from a server, over the connections that its requests use; or why there is none. Bounded in bytes and
in time, whatever the server does."""

from __future__ import annotations

import asyncio

from penstock.dialects.liveness import Answer
from penstock.http import clock as clocks
from penstock.http.call import Failure, FailureKind
from penstock.http.message import ResponseHead
from penstock.http.upstream import Upstream

_MAX_BYTES = 8 << 20  # an exposition of a server with many adapters and ranks has a few


class _Receiver:
    def __init__(self, most_bytes: int) -> None:
        self.done: asyncio.Future[Answer | Failure] = asyncio.get_running_loop().create_future()
        self._most_bytes = most_bytes
        self._head: ResponseHead | None = None
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def head(self, head: ResponseHead) -> None:
        self._head = head

    def data(self, data: bytes, is_last: bool) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > self._most_bytes:
            self.failed(Failure(FailureKind.MALFORMED, "the answer is too large"))
            return
        self._parts.append(data)
        if is_last and not self.done.done():
            assert self._head is not None
            self.done.set_result(Answer(self._head.status, self._head.headers, b"".join(self._parts)))

    def failed(self, failure: Failure) -> None:
        if not self.done.done():
            self.done.set_result(failure)


async def fetch(
    upstream: Upstream,
    target: bytes,
    headers: bytes,
    *,
    timeout_s: float,
    body: bytes | None = None,
    most_bytes: int = _MAX_BYTES,
) -> Answer | Failure:
    """GET, or POST where there is a body."""
    receiver = _Receiver(most_bytes)
    method = b"GET" if body is None else b"POST"
    call = upstream.send(method, target, headers, body or b"", receiver)
    try:
        async with clocks.timeout(upstream.clock, timeout_s):
            return await receiver.done
    except TimeoutError:
        return Failure(FailureKind.FIRST_BYTE_TIMEOUT, f"no answer within {timeout_s:g} s")
    finally:
        call.cancel()  # one that is over does not mind
