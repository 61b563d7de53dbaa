"""An upstream's answer written to a client's exchange: bytes go through as they come, and one outcome is told at last.

The answer's head is held until its first body bytes are here: until then the client has seen nothing, and the request
can go elsewhere. Server-sent events are passed on whole only, so a stream that breaks can be carried on, or ended with
an event that says why, without the client ever having seen half of one. Nothing is parsed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum

import msgspec

from penstock.http.call import Call, Failure
from penstock.http.exchange import Sink
from penstock.http.message import ResponseHead
from penstock.http.upstream import Upstream

_PASSED_ON = frozenset(
    (b"content-type", b"content-encoding", b"content-language", b"cache-control", b"retry-after", b"x-accel-buffering")
)
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_MAX_HELD_BYTES = 1 << 20  # of one event; a longer one is passed on in pieces
_MAX_DECLINED_BYTES = 64 << 10  # kept of an answer that is not passed on
_TAIL_READS = 4


class End(StrEnum):
    COMPLETED = "completed"
    UNFINISHED = "unfinished"  # it ended in good order, but `is_whole` says before its time; the exchange is still open
    DECLINED = "declined"  # an answer came, and the caller did not want it passed on
    CLIENT_GONE = "client_gone"
    FAILED_BEFORE = "upstream_failed_before_first_byte"  # the client has seen nothing
    FAILED_AFTER = "upstream_failed_after_first_byte"  # the exchange is still open: carry it on, end it or abort it


class Outcome(msgspec.Struct, frozen=True, gc=False):
    end: End
    status: int | None  # None: no head came
    num_bytes: int  # of the body, passed on by this forwarding
    first_byte_s: float | None  # from the sending to the first body bytes
    total_s: float
    tail: bytes  # the last few reads, where usage is; of a declined answer its body
    failure: Failure | None = None
    headers: bytes = b""  # of a declined answer, those lines that a client may see


Done = Callable[[Outcome], None]
Tap = Callable[[bytes], None]
Started = Callable[[], object]
Wanted = Callable[[ResponseHead], bool]
IsWhole = Callable[[bytes], bool]


class Forwarding:
    """Receiver of the upstream, watcher of the client. It owns the call, not the exchange."""

    __slots__ = (
        "_call",
        "_done",
        "_extra_headers",
        "_first_byte_s",
        "_has_events",
        "_head",
        "_held",
        "_is_declined",
        "_is_whole",
        "_now",
        "_num_bytes",
        "_sink",
        "_started",
        "_started_s",
        "_tail",
        "_tap",
        "_upstream",
        "_wanted",
    )

    def __init__(
        self,
        sink: Sink,
        upstream: Upstream,
        done: Done,
        *,
        extra_headers: bytes,
        wanted: Wanted | None,
        started: Started | None,
        tap: Tap | None,
        is_whole: IsWhole | None,
    ) -> None:
        self._sink = sink
        self._upstream = upstream
        self._done: Done | None = done
        self._extra_headers = extra_headers
        self._wanted = wanted
        self._started = started
        self._tap = tap
        self._is_whole = is_whole
        self._call: Call | None = None
        self._head: ResponseHead | None = None
        self._is_declined = False
        self._has_events = False
        self._held = b""
        self._tail: deque[bytes] = deque(maxlen=_TAIL_READS)
        self._num_bytes = 0
        self._first_byte_s: float | None = None
        self._now = upstream.clock.now
        self._started_s = self._now()

    def begin(self, method: bytes, target: bytes, headers: bytes, body: bytes) -> None:
        self._sink.watcher = self
        self._call = self._upstream.send(method, target, headers, body, self)

    def cancel(self) -> None:
        """Gives up this upstream. The client's exchange stays as it is; `done` is not called."""
        self._done = None
        self._over()

    # -- what the upstream says

    def head(self, head: ResponseHead) -> None:
        self._head = head
        self._is_declined = self._wanted is not None and not self._wanted(head)
        headers = head.headers
        self._has_events = (
            headers.get(b"content-type", b"").startswith(b"text/event-stream") and b"content-encoding" not in headers
        )
        if self._is_declined:
            self._tail = deque()  # all of it, within bounds

    def data(self, data: bytes, is_last: bool) -> None:
        if self._has_events and not is_last:
            data = self._whole_events(data)
        elif self._held:
            data, self._held = self._held + data, b""
        if data:
            if self._first_byte_s is None:
                self._first_byte_s = self._now() - self._started_s
            if self._is_declined:
                if sum(map(len, self._tail)) + len(data) <= _MAX_DECLINED_BYTES:
                    self._tail.append(data)
                data = b""
            else:
                self._tail.append(data)
                if self._tap is not None:
                    self._tap(data)
        if is_last:
            self._call = None
            sink = self._sink
            sink.watcher = None
            if self._is_declined:
                self._end(End.DECLINED)
                return
            is_whole = self._is_whole is None or self._is_whole(b"".join(self._tail))
            self._pass_on(sink, data, is_last=is_whole)
            self._end(End.COMPLETED if is_whole else End.UNFINISHED)
        elif data:
            self._pass_on(self._sink, data, is_last=False)

    def failed(self, failure: Failure) -> None:
        self._call = None
        self._sink.watcher = None
        self._end(End.FAILED_AFTER if self._sink.is_started else End.FAILED_BEFORE, failure)

    # -- what the client does

    def client_gone(self) -> None:
        self._over()
        self._end(End.CLIENT_GONE)

    def pause(self) -> None:
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        if self._call is not None:
            self._call.resume()

    # -- inside

    def _pass_on(self, sink: Sink, data: bytes, is_last: bool) -> None:
        self._num_bytes += len(data)
        if sink.is_started:
            sink.write(data, is_last)
            return
        head = self._head
        assert head is not None
        headers = _passed_on(head) + self._extra_headers
        length = head.headers.get(b"content-length")
        sink.start(head.status, headers, length=None if length is None else int(length), data=data, is_last=is_last)
        if self._started is not None:
            self._started()

    def _whole_events(self, data: bytes) -> bytes:
        """Bytes that may go on now; the rest waits for the end of its event."""
        if self._held:
            data, self._held = self._held + data, b""
        if data.endswith(_EVENT_ENDS):
            return data
        end = max(found + len(mark) if (found := data.rfind(mark)) >= 0 else 0 for mark in _EVENT_ENDS)
        if len(data) - end > _MAX_HELD_BYTES:
            return data
        self._held = data[end:]
        return data[:end]

    def _over(self) -> None:
        call, self._call = self._call, None
        if self._sink.watcher is self:
            self._sink.watcher = None
        if call is not None:
            call.cancel()

    def _end(self, end: End, failure: Failure | None = None) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        now_s, head = self._now(), self._head
        done(
            Outcome(
                end,
                head.status if head is not None else None,
                self._num_bytes,
                self._first_byte_s,
                now_s - self._started_s,
                b"".join(self._tail),
                failure,
                _passed_on(head) if head is not None and self._is_declined else b"",
            )
        )


def _passed_on(head: ResponseHead) -> bytes:
    return b"".join([b"%b: %b\r\n" % pair for pair in head.headers.items() if pair[0] in _PASSED_ON])


def forward(
    sink: Sink,
    upstream: Upstream,
    *,
    target: bytes,
    headers: bytes,
    body: bytes,
    done: Done,
    method: bytes = b"POST",
    extra_headers: bytes = b"",
    wanted: Wanted | None = None,
    started: Started | None = None,
    tap: Tap | None = None,
    is_whole: IsWhole | None = None,
) -> Forwarding:
    """Sends `body` to `upstream` and its answer to the exchange's client; `done` is told once, when that has ended.

    One that has started already is carried on: the new answer's body follows what was written before. `wanted` may
    decline an answer by its head (an overloaded replica's 429), `started` is told when the client's answer begins, if
    it had not, `tap` sees every byte that is passed on,
    `is_whole` is shown the last few reads of an answer that has ended and says whether that was all of it.
    """
    forwarding = Forwarding(
        sink, upstream, done, extra_headers=extra_headers, wanted=wanted, started=started, tap=tap, is_whole=is_whole
    )
    forwarding.begin(method, target, headers, body)
    return forwarding
