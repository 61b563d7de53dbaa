"""One connection to an upstream: a call goes out, its answer comes back, then the next. Knows no client."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

from penstock.http.call import Call, Failure, FailureKind
from penstock.http.limits import UpstreamLimits
from penstock.http.message import ResponseHead

_JOIN_BYTES = 64 << 10  # up to here one copy is cheaper than a second buffer to write


class Pool(Protocol):
    """Interface of the pool that a connection belongs to."""

    limits: UpstreamLimits

    def connect(self, call: Call) -> None: ...
    def opened(self, connection: UpstreamConnection) -> None: ...
    def closed(self, connection: UpstreamConnection) -> None: ...
    def release(self, connection: UpstreamConnection) -> bool: ...


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._call: Call | None = None
        self._was_used = False
        self._is_reading = True
        self._is_quiet = False  # no byte since the last sweep
        self._quiet_since = 0.0
        # The answer that is arriving
        self._headers: dict[bytes, bytes] = {}
        self._head: ResponseHead | None = None
        self._is_head_told = False
        self._head_bytes = 0
        self._parts: list[bytes] = []
        self._is_complete = False
        self._keep_alive = False

    @property
    def is_idle(self) -> bool:
        return self._call is None

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def begin(self, call: Call) -> None:
        if call.receiver is None:  # cancelled while it was connecting
            self._retire()
            return
        self._call = call
        call.connection = self
        self._head = None
        self._is_head_told = self._is_complete = self._is_quiet = False
        self._head_bytes = 0
        if len(call.body) <= _JOIN_BYTES:
            self._transport.write(call.head + call.body)
        else:
            self._transport.writelines((call.head, call.body))

    def pause(self) -> None:
        if self._is_reading and not self._transport.is_closing():
            self._is_reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._is_reading and not self._transport.is_closing():
            self._is_reading = True
            self._is_quiet = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()

    def sweep(self, now: float) -> None:
        if not self._is_quiet or not self._is_reading:
            self._is_quiet, self._quiet_since = True, now
            return
        limits, quiet_s = self._pool.limits, now - self._quiet_since
        if self._call is None:
            if quiet_s > limits.keep_alive_s:
                self.abort()
        elif not self._has_answered and quiet_s > limits.first_byte_timeout_s:
            self._fail(FailureKind.FIRST_BYTE_TIMEOUT, f"no answer within {limits.first_byte_timeout_s:g} s")
        elif self._has_answered and quiet_s > limits.silence_timeout_s:
            self._fail(FailureKind.SILENCE, f"the answer stopped for {limits.silence_timeout_s:g} s")

    # -- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # nobody asked: whatever it is, the next answer could be confused with it
            self._transport.abort()
            return
        self._is_quiet = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._is_complete:
                self._fail(FailureKind.MALFORMED, f"the answer is not HTTP: {error}")
                return
            self._transport.abort()  # more than the answer: all of that is good, the connection is not
        if self._head is None:
            self._head_bytes += len(data)
            if self._head_bytes > self._pool.limits.max_head_bytes:
                self._fail(FailureKind.MALFORMED, "the answer's head is too large")
            return
        self._tell(call)

    def eof_received(self) -> None:
        """The transport closes now; `connection_lost` says what it means."""

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.closed(self)
        call = self._call
        if call is not None:
            if self._ends_with_connection and error is None:
                self._is_complete = True
                self._tell(call)
            elif self._has_answered:
                self._fail(FailureKind.BROKEN, "the connection was closed in mid-answer")
            elif self._was_used and not call.has_retried and call.receiver is not None:
                # It was closed while it lay unused, as servers do, and the news and the request crossed.
                call.has_retried = True
                self._call = call.connection = None
                self._pool.connect(call)
            else:
                self._fail(FailureKind.CLOSED, "the connection was closed before an answer")
        del self._parser  # it holds our methods: a cycle

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise ValueError("more than one answer")
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._head = ResponseHead(status, self._headers)

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._is_complete = self._head is not None  # else it was one of 100 to 199, and the answer is yet to come
        self._keep_alive = self._parser.should_keep_alive()  # it knows now, and only now

    # -- inside

    @property
    def _has_answered(self) -> bool:
        return self._head is not None or self._head_bytes > 0

    @property
    def _ends_with_connection(self) -> bool:
        """The answer has neither a length nor chunks: its end is the connection's."""
        head = self._head
        return head is not None and not {b"content-length", b"transfer-encoding"} & head.headers.keys()

    def _tell(self, call: Call) -> None:
        """Everything that came in one read, at once. A finished connection is free before the receiver hears of it."""
        head, receiver = self._head, call.receiver
        assert head is not None
        if receiver is None:
            return
        parts = self._parts
        data = (parts[0] if len(parts) == 1 else b"".join(parts)) if parts else b""
        if parts:
            self._parts = []
        is_last = self._is_complete or call.is_head_only
        is_first, self._is_head_told = not self._is_head_told, True
        if is_last:
            self._finish(call)
        if is_first:
            receiver.head(head)
        if call.receiver is not None or is_last:
            receiver.data(data, is_last)

    def _finish(self, call: Call) -> None:
        self._call = call.connection = call.receiver = None
        self._was_used = True
        if not self._is_reading:
            self.resume()
        if self._transport.is_closing():
            return
        # After HEAD the parser waits for a body that never comes: the connection cannot be used again.
        if call.is_head_only or not self._keep_alive or not self._pool.release(self):
            self._retire()

    def _retire(self) -> None:
        self._call = None
        self._transport.abort()

    def _fail(self, kind: FailureKind, message: str) -> None:
        call, self._call = self._call, None
        self._parts = []
        self._transport.abort()
        if call is not None:
            call.connection = None
            call.fail(Failure(kind, message))
