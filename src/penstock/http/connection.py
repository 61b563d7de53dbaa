"""One client's connection: bytes become requests, in order; answers go back, in order.

Hot: a request that arrives in one read costs one feed of the parser and no timer. Deadlines are plain attributes that
the server's sweep compares with the time; `acceptor.now` is as old as the last sweep, which is exact enough for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Protocol, cast

import httptools

from penstock.core.errors import (
    BodyTooLarge,
    BuffersFull,
    HeadersTooLarge,
    InvalidRequest,
    PenstockError,
    RequestTimeout,
)
from penstock.http import message
from penstock.http.bodies import BodyBudget
from penstock.http.exchange import NOBODY, Exchange, Upgraded
from penstock.http.limits import ClientLimits
from penstock.http.message import Request
from penstock.http.uploads import Upload

logger = logging.getLogger("penstock.gateway")

_BETWEEN, _HEAD, _BODY = range(3)  # what of the next request has arrived: nothing, part of its head, part of its body
_RETRY_BODY_S = 2.0  # a large body takes about as long to arrive
_PROGRESS_BYTES = 1 << 20  # of an upload: so many begin its time anew
_HEADER_OVERHEAD = 32  # as HTTP/2 counts, so that a limit on bytes is one on their number too


class Acceptor(Protocol):
    """Interface of the server that a connection belongs to."""

    limits: ClientLimits
    upgrades: frozenset[bytes]
    bodies: BodyBudget
    now: float
    is_draining: bool
    idle_grace_s: float

    def serve(self, exchange: Exchange) -> None: ...

    upload_paths: frozenset[bytes]

    def body_owner(self, head: Request) -> str | None: ...
    def upload(self, head: Request, resume: Callable[[], None]) -> Upload: ...
    def turn_away(self, exchange: Exchange, error: PenstockError) -> None: ...
    def opened(self, connection: Connection) -> bool: ...
    def closed(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    def __init__(self, acceptor: Acceptor) -> None:
        self._acceptor = acceptor
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._exchange: Exchange | None = None
        self._waiting: deque[Exchange] = deque()  # pipelined requests, complete
        self._refusal: PenstockError | None = None  # to be said once what came before is answered; then the end
        self._is_closing = False  # nothing is read any more
        self._is_advancing = False
        self._is_reading = True
        self._is_paused = False  # the client does not take what we send
        self._unsent_bytes = 0
        self._write_deadline = inf
        # The request that is arriving
        self._phase = self._timed_phase = _BETWEEN
        self._read_deadline = inf
        self._has_completed = False  # a request, in this read
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0  # of what is parsed, with overhead
        self._unparsed_bytes = 0  # of what was read while the head was incomplete
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._seen_body_bytes = 0  # as of the last read that did not complete it
        self._owner: str | None = None  # in the budget of bodies; None: nobody's yet
        self._reserved_bytes = 0
        self._owes_continue = False
        self._upload: Upload | None = None  # takes the body that is arriving; None: it is held here
        self._is_body_unread = False  # it was answered without its body, which may still come
        self._wants_upgrade = False  # what comes after it is no HTTP
        self._upgraded: Upgraded | None = None  # what speaks here since

    # -- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._acceptor.limits.max_unsent_bytes)
        self._read_deadline = self._acceptor.now + self._acceptor.limits.head_timeout_s
        if not self._acceptor.opened(self):
            self._is_closing = True
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_closing or self._is_body_unread:
            if self._upgraded is not None and not self._is_closing:
                self._upgraded.received(data)
            return
        self._has_completed = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgraded is not None and (rest := data[upgrade.args[0] :]):
                self._upgraded.received(rest)
            return
        except httptools.HttpParserError as error:
            if not self._is_closing:  # what follows a request that closes the connection means nothing
                self._refuse(self._refusal or InvalidRequest(f"this is not HTTP/1.1: {error}"))
            return
        if self._phase:
            self._incomplete(0 if self._has_completed else len(data))  # else most of it may be another request's

    def eof_received(self) -> None:
        """A client that has closed its side counts as gone: the transport closes now."""

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        self._waiting.clear()
        self._forget_body()
        self._acceptor.closed(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost()
        upgraded, self._upgraded = self._upgraded, None
        if upgraded is not None:
            upgraded.lost()
        self._refusal = None  # its traceback holds us, and the parser holds our methods: cycles
        del self._parser

    def never_opened(self) -> None:
        """The handshake failed."""
        self._is_closing = True
        del self._parser

    def pause_writing(self) -> None:
        self._is_paused = True
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._write_deadline = self._acceptor.now + self._acceptor.limits.stall_timeout_s
        if self._exchange is not None and self._exchange.watcher is not None:
            self._exchange.watcher.pause()
        elif self._upgraded is not None:
            self._upgraded.pause()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._write_deadline = inf
        if self._exchange is not None and self._exchange.watcher is not None:
            self._exchange.watcher.resume()
        elif self._upgraded is not None:
            self._upgraded.resume()
        elif self._exchange is None:
            self._advance()

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        self._phase = _HEAD
        self._headers = {}
        self._body = b""
        self._target = b""
        self._head_bytes = self._unparsed_bytes = self._body_bytes = self._seen_body_bytes = 0

    def on_url(self, part: bytes) -> None:
        self._target += part
        self._head_bytes += len(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + _HEADER_OVERHEAD
        if (
            self._phase == _BODY
        ):  # a trailer: counted and dropped, for nothing that comes after a body may change its head
            if self._head_bytes > self._acceptor.limits.max_head_bytes:
                self._stop(self._head_too_large())
            return
        name = name.lower()
        if name == b"host" and name in self._headers:
            self._stop(InvalidRequest("a request has one Host header, not two"))
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._phase = _BODY
        headers = self._headers
        if self._head_bytes > self._acceptor.limits.max_head_bytes:
            self._stop(self._head_too_large())
        if b"host" not in headers and self._parser.get_http_version() != "1.0":
            self._stop(InvalidRequest("a request of HTTP/1.1 has a Host header"))
        if self._parser.should_upgrade():
            self._check_upgrade()
        if self._target.partition(b"?")[0] in self._acceptor.upload_paths and self._parser.get_method() == b"POST":
            self._open_upload()
        if int(headers.get(b"content-length", b"0")) > self._max_body_bytes:
            self._stop(self._too_large())
        if headers.get(b"expect", b"").lower() == b"100-continue":
            self._owes_continue = True

    def on_body(self, part: bytes) -> None:
        if self._upload is not None:
            self._body_bytes += len(part)
            if self._body_bytes > self._max_body_bytes:
                self._stop(self._too_large())
            try:
                self._upload.write(part)
            except PenstockError as refusal:
                self._stop(refusal)
            return
        if not self._body_bytes:
            self._body = part  # as it came, where it comes in one piece
        elif isinstance(self._body, bytearray):
            self._body += part
        else:
            self._body = bytearray(self._body)  # not a list: two bytes of a chunk would be an object of forty
            self._body += part
        self._body_bytes += len(part)
        if self._body_bytes > self._acceptor.limits.max_body_bytes:
            self._stop(self._too_large())

    def on_message_complete(self) -> None:
        self._has_completed = True
        if self._wants_upgrade:
            self._exchange = exchange = self._last_read()
            self._acceptor.serve(exchange)
            return
        body = self._body
        exchange = self._arrived(bytes(body) if isinstance(body, bytearray) else body, self._parser.should_keep_alive())
        if self._exchange is None and not self._is_paused and not self._waiting:
            self._exchange = exchange
            self._acceptor.serve(exchange)
        elif not self._is_closing:
            self._waiting.append(exchange)
            self._read(False)  # what is held stays bounded by one read

    # -- the exchange's side

    @property
    def peer(self) -> str:
        address = self._transport.get_extra_info("peername")
        return address[0] if isinstance(address, tuple) else NOBODY  # it may have gone by now

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def answered(self, close: bool) -> None:
        self._exchange = None
        if self._is_body_unread:
            self._linger()
            return
        acceptor = self._acceptor
        if close or (acceptor.is_draining and not acceptor.idle_grace_s):
            self._close()
            return
        self._read_deadline = acceptor.now + (acceptor.idle_grace_s or acceptor.limits.idle_timeout_s)
        self._timed_phase = _BETWEEN
        if self._waiting or self._phase or self._refusal is not None:
            self._advance()

    def drop(self) -> None:
        self._exchange = None
        self._is_closing = True
        self._transport.abort()

    def switch(self, head: bytes, protocol: Upgraded) -> None:
        self._exchange, self._upgraded, self._read_deadline = None, protocol, inf
        self._transport.write(head)
        protocol.opened(self)
        if self._acceptor.is_draining:
            protocol.drain()
        if not self._is_closing:
            self._read(True)

    # -- the side of what the connection has become

    @property
    def now(self) -> float:
        return self._acceptor.now

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def hold_reading(self, is_held: bool) -> None:
        if not self._is_closing:
            self._read(not is_held)

    def reserve(self, owner: str, num_bytes: int) -> bool:
        return self._acceptor.bodies.reserve(owner, num_bytes)

    def release(self, owner: str, num_bytes: int) -> None:
        self._acceptor.bodies.release(owner, num_bytes)

    def close(self) -> None:
        self._close()

    def linger(self) -> None:
        self._linger()

    # -- the server's side

    def sweep(self, now: float) -> None:
        """Deadlines. A running exchange has its own, but for a client that takes nothing of it."""
        if now >= self._write_deadline:
            unsent_bytes = self._transport.get_write_buffer_size()
            if unsent_bytes >= self._unsent_bytes:
                self._transport.abort()
                return
            self._unsent_bytes = unsent_bytes
            self._write_deadline = now + self._acceptor.limits.stall_timeout_s
        elif now >= self._read_deadline and self._exchange is None:
            if self._is_closing or not self._phase:
                self._transport.abort()
            else:
                self._refuse(RequestTimeout("the request did not arrive in time"))
        elif self._upgraded is not None and not self._is_closing:
            self._upgraded.sweep(now)

    def drain(self) -> None:
        """Ends the connection as soon as nothing is owed to the client."""
        if self._upgraded is not None:
            if not self._is_closing:
                self._upgraded.drain()
            return
        if self._exchange is not None:
            self._exchange.close_after()
        elif not self._phase and not self._waiting:
            if self._acceptor.idle_grace_s:
                self._read_deadline = min(self._read_deadline, self._acceptor.now + self._acceptor.idle_grace_s)
            else:
                self._close()

    def abort(self) -> None:
        self._transport.abort()

    # -- inside

    def _advance(self) -> None:
        """Hands out what waits. A loop, not a recursion: thousands may be waiting, each answered at once."""
        if self._is_advancing:
            return
        self._is_advancing = True
        while self._waiting and self._exchange is None and not self._is_paused and not self._is_closing:
            self._exchange = exchange = self._waiting.popleft()
            self._acceptor.serve(exchange)
        self._is_advancing = False
        if self._exchange is None and not self._waiting and not self._is_closing:
            if self._refusal is not None:
                self._refuse(self._refusal)
                return
            self._read(True)
            if self._phase:
                self._incomplete(0)

    def _incomplete(self, num_bytes: int) -> None:
        """Part of a request has been read: from here it is timed, and what the parser may hold back is bounded."""
        if self._phase != self._timed_phase:
            self._timed_phase = self._phase
            limits = self._acceptor.limits
            timeout_s = limits.head_timeout_s if self._phase == _HEAD else limits.body_timeout_s
            self._read_deadline = self._acceptor.now + timeout_s
        if self._phase == _HEAD:
            self._unparsed_bytes += num_bytes
            if self._unparsed_bytes > self._acceptor.limits.max_head_bytes:
                self._refuse(self._head_too_large())
        elif self._exchange is not None or self._waiting:
            self._read(False)  # its turn comes: until then its body is not asked for
        elif self._upload is not None:
            self._upload_incomplete(self._upload, num_bytes)
        else:
            self._body_incomplete(num_bytes)

    def _body_incomplete(self, num_bytes: int) -> None:
        """A body that comes in more than one read. Only now, for it to cost the others nothing: whose it is, by its
        headers, and whether there is room."""
        if self._owner is None:
            try:
                self._owner = self._acceptor.body_owner(self._head())
            except PenstockError as refusal:
                self._answer_unread(refusal)
                return
            if self._owner is None:
                self._answer_unread(None)
                return
            num_bytes = self._unparsed_bytes = 0
        if self._is_without_end(num_bytes):
            self._refuse(self._head_too_large())
        elif not self._has_room():
            self._answer_unread(BuffersFull("too many bodies of requests arrive at once", retry_after_s=_RETRY_BODY_S))
        else:
            self._ask_for_body()

    def _upload_incomplete(self, upload: Upload, num_bytes: int) -> None:
        """A body that is taken as it comes. Its time begins anew with every so many bytes, and stands still while its
        taker has enough."""
        progress = self._body_bytes // _PROGRESS_BYTES != self._seen_body_bytes // _PROGRESS_BYTES
        if self._is_without_end(num_bytes):
            self._refuse(self._head_too_large())
            return
        self._ask_for_body()
        if upload.is_full:
            self._read(False)
            self._read_deadline = inf
        elif progress:
            self._read_deadline = self._acceptor.now + self._acceptor.limits.body_timeout_s

    def _upload_resumed(self) -> None:
        if self._upload is not None and not self._is_closing and self._exchange is None and not self._waiting:
            self._read_deadline = self._acceptor.now + self._acceptor.limits.body_timeout_s
            self._read(True)

    def _is_without_end(self, num_bytes: int) -> bool:
        """Whether too much of a body came that was none of its bytes."""
        if self._body_bytes != self._seen_body_bytes:
            self._seen_body_bytes, self._unparsed_bytes = self._body_bytes, 0
            return False
        self._unparsed_bytes += num_bytes  # chunks without bytes, or trailers, of which the parser holds back one
        return self._unparsed_bytes > self._acceptor.limits.max_head_bytes

    def _ask_for_body(self) -> None:
        if self._owes_continue:
            self._owes_continue = False
            self._transport.write(message.CONTINUE)

    def _open_upload(self) -> None:
        try:
            self._upload = self._acceptor.upload(self._head(), self._upload_resumed)
        except PenstockError as refusal:
            self._stop(refusal)

    @property
    def _max_body_bytes(self) -> int:
        return self._acceptor.limits.max_body_bytes if self._upload is None else self._upload.max_bytes

    def _has_room(self) -> bool:
        """Takes room for all of a body whose length is declared; for others twice what has come, as it comes."""
        if self._reserved_bytes and self._body_bytes <= self._reserved_bytes:
            return True
        declared = self._headers.get(b"content-length")
        needed = int(declared) if declared else min(max(2 * self._body_bytes, 1), self._acceptor.limits.max_body_bytes)
        assert self._owner is not None
        if not self._acceptor.bodies.reserve(self._owner, needed - self._reserved_bytes):
            return False
        self._reserved_bytes = needed
        return True

    def _head(self) -> Request:
        return Request(self._parser.get_method(), self._target, self._headers, b"")

    def _answer_unread(self, refusal: PenstockError | None) -> None:
        """Hands the request out without its body, of which nothing more is read; None: it needs none."""
        self._exchange = exchange = self._last_read()
        if refusal is None:
            self._acceptor.serve(exchange)
        else:
            self._acceptor.turn_away(exchange, refusal)

    def _last_read(self) -> Exchange:
        """The request as it is: nothing that comes after it is read as HTTP."""
        self._is_body_unread = True
        self._read(False)
        exchange = self._arrived(b"", keep_alive=False)
        exchange.can_upgrade = self._wants_upgrade
        return exchange

    def _check_upgrade(self) -> None:
        """A change of protocols: to WebSocket, when all that came before is answered. Bytes that follow the head are
        the other protocol's, so it has no body."""
        headers = self._headers
        is_websocket = headers.get(b"upgrade", b"").strip().lower() == b"websocket"
        if not is_websocket or self._target.partition(b"?")[0] not in self._acceptor.upgrades:
            self._stop(InvalidRequest("this server does not change protocols here, or not to this one"))
        if self._parser.get_method() != b"GET" or self._parser.get_http_version() != "1.1":
            self._stop(InvalidRequest("a change of protocols is asked for by a GET of HTTP/1.1"))
        if headers.get(b"content-length", b"0").strip(b"0") or b"transfer-encoding" in headers:
            self._stop(InvalidRequest("a request for another protocol has no body"))
        if self._exchange is not None or self._waiting or self._is_paused:
            self._stop(InvalidRequest("a request for another protocol waits for the answers to those before it"))
        self._wants_upgrade = True

    def _arrived(self, body: bytes, keep_alive: bool) -> Exchange:
        parser = self._parser
        # Only HTTP/1.0 needs to say that it keeps the connection, and only 1.1 keeps it without a word.
        speaks_chunked = (keep_alive and b"connection" not in self._headers) or parser.get_http_version() == "1.1"
        upload, self._upload = self._upload, None
        request = Request(parser.get_method(), self._target, self._headers, body, upload)
        self._phase = self._timed_phase = _BETWEEN
        self._forget_body()
        return Exchange(self, request, keep_alive and not self._acceptor.is_draining, speaks_chunked)

    def _forget_body(self) -> None:
        self._body = b""
        self._owes_continue = False
        if self._upload is not None:
            upload, self._upload = self._upload, None
            upload.lost()
        if self._owner is not None:
            if self._reserved_bytes:
                self._acceptor.bodies.release(self._owner, self._reserved_bytes)
            self._owner, self._reserved_bytes = None, 0

    def _read(self, wanted: bool) -> None:
        if wanted != self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    def _stop(self, refusal: PenstockError) -> None:
        """Raises the refusal out of a callback of the parser: it reads no further."""
        self._refusal = refusal
        raise refusal

    def _refuse(self, refusal: PenstockError) -> None:
        self._refusal = refusal
        self._forget_body()
        if self._exchange is not None or self._waiting:
            self._phase = _BETWEEN
            self._read(False)  # the parser can take no more
            return
        status, headers, body = message.render_error(refusal, self._target)
        self._transport.write(
            b"%b%b%bcontent-length: %d\r\n\r\n%b"
            % (message.status_line(status), headers, message.CLOSE, len(body), body)
        )
        self._linger()

    def _linger(self) -> None:
        """Closes our side only. Closing both with bytes unread would reset the connection, and the answer with it."""
        self._is_closing = True
        self._read_deadline = self._acceptor.now + self._acceptor.limits.linger_s
        self._read(True)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _close(self) -> None:
        self._is_closing = True
        self._waiting.clear()
        self._read_deadline = self._acceptor.now + self._acceptor.limits.stall_timeout_s
        self._transport.close()

    def _too_large(self) -> PenstockError:
        return BodyTooLarge(f"the body is larger than the limit of {self._max_body_bytes} bytes")

    def _head_too_large(self) -> PenstockError:
        return HeadersTooLarge(f"the headers are larger than the limit of {self._acceptor.limits.max_head_bytes} bytes")
