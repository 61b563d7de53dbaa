"""Exchanges of /v1/responses: a client's, whose answer is kept before its end is told, and one that has no client.

The end of an answer is held back until the store has it: whoever has read it can go on from there at once, at any
gateway. A stream that breaks off ends with `response.failed`, and nobody sees an error without a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from penstock.api import sse
from penstock.api.responses.objects import Object, encode
from penstock.api.responses.stored import read_response
from penstock.gateway.records.whole_bill import WholeBill
from penstock.http.exchange import Exchange, NoChannel, Watcher
from penstock.http.message import Request

_EVENTS = b"content-type: text/event-stream"
_ERROR = b'data: {"error"'
_LAST = re.compile(rb"^event: response\.(?:completed|incomplete|failed)\r?\ndata: ", re.MULTILINE)
_FIRST = re.compile(rb"^event: response\.created\r?\ndata: (.*?)\r?\n\r?\n", re.MULTILINE)
_NUMBER = re.compile(rb'^data: \{"type":"[^"]*","sequence_number":(\d+)', re.MULTILINE)

# A response that has ended, and who is to be told whether it is kept.
Keep = Callable[[Object, Callable[[bool], None]], None]


class ResponseExchange(Exchange):
    """A client's exchange with another request: what the client asked for, without the state that was asked for."""

    __slots__ = ("_client", "_first", "_has_events", "_head", "_held", "_keep", "_last_number", "_parts")

    def __init__(self, client: Exchange, body: bytes, keep: Keep | None) -> None:
        """`keep`: None: its answer is not kept."""
        asked = client.request
        super().__init__(NoChannel(), Request(asked.method, asked.target, asked.headers, body), False, False)
        self._client = client
        self._keep = keep
        self._has_events = False
        self._head: tuple[int, bytes] | None = None  # of an answer that is told as a whole
        self._parts: list[bytes] = []  # of that
        self._held: list[bytes] | None = None  # the end of a stream, while it is being kept
        self._first = b""  # the beginning of a stream, with the response as it was then
        self._last_number = -1  # of the events that were written

    @property
    def is_open(self) -> bool:
        return self._client.is_open

    @property
    def peer(self) -> str:
        return self._client.peer

    @property
    def is_started(self) -> bool:
        return self._client.is_started or self._head is not None

    @is_started.setter
    def is_started(self, is_started: bool) -> None: ...

    @property
    def watcher(self) -> Watcher | None:
        return self._client.watcher

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        if hasattr(self, "_client"):
            self._client.watcher = watcher

    def abort(self) -> None:
        self._client.abort()

    def close_after(self) -> None:
        self._client.close_after()

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        self._has_events = status == 200 and _EVENTS in headers
        if self._has_events:
            self._client.start(status, headers, length=length)
        elif status == 200 and self._keep is not None:
            self._head = (status, headers)
        else:
            self._client.start(status, headers, length=length, data=data, is_last=is_last)
            return
        self.write(data, is_last)

    def write(self, data: bytes, is_last: bool = False) -> None:
        if self._has_events:
            self._write_events(data, is_last)
        elif self._head is not None:
            self._parts.append(data)
            if is_last:
                self._keep_whole(b"".join(self._parts))
        else:
            self._client.write(data, is_last)

    def _keep_whole(self, body: bytes) -> None:
        response = read_response(body)
        if response is None or self._keep is None:
            self._end_whole(body)
            return
        self._keep(response, lambda is_kept: self._end_whole(body if is_kept else _unkept(response)))

    def _end_whole(self, body: bytes) -> None:
        assert self._head is not None
        status, headers = self._head
        self._client.start(status, headers, length=len(body), data=body, is_last=True)

    # -- streams

    def _write_events(self, data: bytes, is_last: bool) -> None:
        """Whole events, as all that is passed on are."""
        if self._held is not None:  # nothing but an end in form comes after the last event
            self._held.append(data)
            return
        if not self._first and data:
            self._first = data
        if data.startswith(_ERROR):
            data = self._failure(data) or data
        found = _LAST.search(data)
        if found is None or self._keep is None:
            for number in _NUMBER.finditer(data):
                self._last_number = int(number[1])
            self._client.write(data, is_last)
            return
        before, last = data[: found.start()], data[found.start() :]
        if before:
            self._client.write(before)
        event, _, rest = last.partition(b"\n\n")
        response = response_in(event)
        if response is None:
            self._client.write(last, is_last)
            return
        self._held = [rest]

        def end(is_kept: bool) -> None:
            kept = event if is_kept else _unkept_event(event)
            held, self._held = self._held or [], []
            # The upstream has come to its end, or will never: what is after the last event means nothing to a client.
            self._client.write(b"\n\n".join((kept, b"".join(held))), is_last=True)

        self._keep(response, end)

    def _failure(self, error: bytes) -> bytes | None:
        """The event of a response that failed, in place of an error; None: the stream had not begun."""
        first = _FIRST.search(self._first)
        try:
            begun = msgspec.json.decode(first[1])["response"] if first is not None else None
            told = msgspec.json.decode(error.removeprefix(b"data: ").strip())["error"]
        except (ValueError, KeyError, TypeError):
            return None
        if begun is None:
            return None
        message = f"{told.get('code')}: {told.get('message')}"
        failed = begun | {"status": "failed", "error": {"code": "server_error", "message": message}}
        event = {"type": "response.failed", "sequence_number": self._last_number + 1, "response": failed}
        return sse.event(encode(event), b"response.failed")


class BackgroundExchange(Exchange):
    """An exchange without a client: whoever asked has an answer already, and the whole of this one is for the store."""

    __slots__ = ("_ended", "_is_over", "_parts", "_status", "bill", "key")

    def __init__(
        self,
        request: Request,
        key: tuple[str, str],
        ended: Callable[[BackgroundExchange, int, bytes], None],
        bill: WholeBill | None = None,
    ) -> None:
        """`key`: tenant and response; `ended`: told status and body of the answer, once, unless it is cancelled;
        `bill`: who is told its usage, if not the ledger."""
        super().__init__(NoChannel(), request, False, False)
        self.key = key
        self.bill = bill
        self._ended = ended
        self._is_over = False
        self._status = 0
        self._parts: list[bytes] = []

    @property
    def is_open(self) -> bool:
        return not self._is_over

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        self.is_started, self._status = True, status
        self.write(data, is_last)

    def write(self, data: bytes, is_last: bool = False) -> None:
        self._parts.append(data)
        if is_last and not self._is_over:
            self._is_over, self.watcher = True, None
            self._ended(self, self._status, b"".join(self._parts))

    def cancel(self) -> None:
        """Gives up the work, as if a client had left."""
        self._is_over, watcher, self.watcher = True, self.watcher, None
        if watcher is not None:
            watcher.client_gone()


def response_in(event: bytes) -> Object | None:
    try:
        found = msgspec.json.decode(event.partition(b"data: ")[2])["response"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _unkept(response: Object) -> bytes:
    return encode(response | {"store": False})


def _unkept_event(event: bytes) -> bytes:
    head, _, data = event.partition(b"data: ")
    found = msgspec.json.decode(data)
    return b"%bdata: %b" % (head, encode(found | {"response": found["response"] | {"store": False}}))
