"""One request on its way to an upstream: who is told what comes back, and what can go wrong. Plain data, no socket."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.http.message import ResponseHead

if TYPE_CHECKING:
    from penstock.http.upstream import Upstream
    from penstock.http.upstream_connection import UpstreamConnection


class FailureKind(StrEnum):
    REFUSED = "refused"  # no connection: nothing was sent
    CONNECT_TIMEOUT = "connect_timeout"  # the same, and it took long
    CLOSED = "closed"  # it was sent; the connection ended before a byte of an answer
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    BROKEN = "broken"  # the answer began, and ended too early
    SILENCE = "silence"  # the answer began, and went on no more
    MALFORMED = "malformed"  # what came is not an HTTP answer


class Failure(NamedTuple):
    kind: FailureKind
    message: str

    @property
    def was_sent(self) -> bool:
        """Whether the upstream may have begun to work on it. If not, sending it elsewhere repeats nothing."""
        return self.kind not in (FailureKind.REFUSED, FailureKind.CONNECT_TIMEOUT)


class Receiver(Protocol):
    """Told of one answer: `head` once, right after it `data` (maybe empty) and again until `is_last`; or `failed`."""

    def head(self, head: ResponseHead) -> None: ...

    def data(self, data: bytes, is_last: bool) -> None:
        """Body bytes without their framing, as many as came in one read."""

    def failed(self, failure: Failure) -> None: ...


class Call:
    __slots__ = ("body", "connection", "has_retried", "head", "is_head_only", "receiver", "task", "upstream")

    def __init__(self, upstream: Upstream, receiver: Receiver, head: bytes, body: bytes, is_head_only: bool) -> None:
        self.upstream = upstream
        self.receiver: Receiver | None = receiver  # None: over, nobody is told any more
        self.head = head
        self.body = body
        self.is_head_only = is_head_only
        self.has_retried = False
        self.connection: UpstreamConnection | None = None
        self.task: asyncio.Task[None] | None = None  # while it has no connection

    def cancel(self) -> None:
        """Ends it, and the connection with it: the only way to tell an HTTP/1.1 server that nobody listens."""
        self.receiver = None
        if self.task is not None:
            self.task.cancel()
        if self.connection is not None:
            self.connection.abort()

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()

    def fail(self, failure: Failure) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.failed(failure)
