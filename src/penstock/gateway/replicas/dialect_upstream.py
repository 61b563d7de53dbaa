"""The way to a replica that is not penstock's: requests go out in its dialect, answers come back in OpenAI's.

An `Upstream` like any other, so who forwards through it knows nothing of dialects. A client's request has only fields
that such a server may be sent; any other is refused here. Streams are always asked for their usage; if the client did
not want that, it comes back as a comment, which clients skip and the books read. A server that will not hear of
priorities is told of none again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from penstock.api.errors import error_body, http_error
from penstock.api.responses import parse_responses
from penstock.core.errors import EngineFailed, EngineUnavailable, InvalidRequest, PenstockError
from penstock.core.request import Priority
from penstock.dialects.dialect import Dialect
from penstock.dialects.engines.openai import OPENAI
from penstock.dialects.fields import CHAT, COMPLETIONS, RESPONSES
from penstock.dialects.liveness import Answer, Verdict, judge
from penstock.dialects.native import NativeAnswer, Render, translate
from penstock.dialects.requests import RequestOptions, prepare, refuses_priority
from penstock.dialects.responses import ChatAnswer, chat_request
from penstock.dialects.usage import hide_usage
from penstock.http.call import Call, Failure, Receiver
from penstock.http.message import ResponseHead
from penstock.http.upstream import Upstream

_WITH_USAGE = RequestOptions(usage=True)
_JSON = {b"content-type": b"application/json"}
_EVENTS = {b"content-type": b"text/event-stream"}
_MAX_BYTES = 32 << 20  # of an answer that is translated whole

log = logging.getLogger(__name__)


class DialectUpstream(Upstream):
    """`dialect` may be set late, when it is known; until then nothing is changed."""

    dialect: Dialect | None = None
    render: Render | None = None  # of the model's chat template, for servers that take text only
    takes_priority = True  # until it says that it does not
    asks_usage = True  # of streams
    forward_fields: frozenset[str] = frozenset()  # that clients may send besides those of `dialects.fields`

    @property
    def dialect_name(self) -> str:
        return self.dialect.name if self.dialect is not None else ""

    def wishing(self, options: RequestOptions, target: bytes, body: bytes) -> PreparedRequest:
        dialect = self.dialect or OPENAI
        options = replace(options, usage=self.asks_usage)
        if target == RESPONSES:
            return PreparedRequest(self, self._as_chat(dialect, options, body))
        return PreparedRequest(self, self._prepare(dialect, options, self.forward_fields, target, body))

    def send(self, method: bytes, target: bytes, headers: bytes, body: bytes, receiver: Receiver) -> Call:
        """A request of the gateway's own; a client's goes by `wishing`."""
        dialect = self.dialect
        if dialect is None or method != b"POST" or target not in (CHAT, COMPLETIONS):
            return super().send(method, target, headers, body, receiver)
        try:
            prepared = self._prepare(dialect, _WITH_USAGE, None, target, body)
        except PenstockError as error:
            return self._refuse(error, receiver)
        return self.send_prepared(prepared, headers, receiver)

    def send_prepared(self, prepared: _Request, headers: bytes, receiver: Receiver) -> Call:
        return super().send(b"POST", prepared.target, headers, prepared.body, prepared.received_by(receiver))

    def _prepare(
        self,
        dialect: Dialect,
        options: RequestOptions,
        forward_fields: frozenset[str] | None,
        target: bytes,
        body: bytes,
    ) -> _Request:
        is_native = dialect.native is not None and target in (CHAT, COMPLETIONS)
        if is_native:
            options = replace(options, usage=False)  # what is translated has one
        if not self.takes_priority:
            options = replace(options, priority=Priority.NORMAL)
        minds_priority = options.priority is not Priority.NORMAL and dialect.priority is not None
        outgoing = prepare(dialect, target, body, options, forward_fields)
        if is_native:
            return self._translate(dialect, target, outgoing.body)

        def received_by(receiver: Receiver) -> Receiver:
            if minds_priority:
                receiver = _MindsPriority(receiver, self, dialect)
            return _HidesUsage(receiver) if outgoing.hides_usage else receiver

        return _Request(target, outgoing.body, received_by)

    def _as_chat(self, dialect: Dialect, options: RequestOptions, body: bytes) -> _Request:
        """A response, asked for as a chat."""
        request = parse_responses(body)
        chat = chat_request(request, asks_usage=self.asks_usage and dialect.has_stream_usage)
        prepared = self._prepare(dialect, options, self.forward_fields, CHAT, chat)

        def received_by(receiver: Receiver) -> Receiver:
            answer = ChatAnswer(request)
            return prepared.received_by(_Translates(receiver, dialect, answer, bool(request.stream)))

        return replace(prepared, received_by=received_by)

    def _translate(self, dialect: Dialect, target: bytes, body: bytes) -> _Request:
        assert dialect.native is not None
        call = translate(
            dialect.native,
            target,
            body,
            request_id=f"cmpl-{uuid4().hex}",
            created=int(time.time()),
            render=self.render,
        )
        return _Request(
            call.target, call.body, lambda receiver: _Translates(receiver, dialect, call.answer, call.is_stream)
        )

    def _refuse(self, error: PenstockError, receiver: Receiver) -> Call:
        """Answers in the server's place, and as late as a server would."""
        call = Call(self, receiver, b"", b"", is_head_only=False)

        def answer() -> None:
            told, call.receiver = call.receiver, None
            if told is not None:
                told.head(ResponseHead(http_error(error).status, _JSON))
                told.data(error_body(error), True)

        asyncio.get_running_loop().call_soon(answer)
        return call


class _Request(msgspec.Struct, frozen=True, gc=False):
    """A request in its server's dialect, and what its answer goes through on the way back."""

    target: bytes
    body: bytes
    received_by: Callable[[Receiver], Receiver]


class PreparedRequest(Upstream):
    """One client's request on its way through a `DialectUpstream`; it has no connections of its own."""

    def __init__(self, upstream: DialectUpstream, prepared: _Request) -> None:
        self._upstream = upstream
        self._prepared = prepared
        self.clock = upstream.clock

    @property
    def body(self) -> bytes:
        """The request as its server is sent it."""
        return self._prepared.body

    def with_body(self, body: bytes) -> PreparedRequest:
        """The same request with something more that servers of this kind are told."""
        return PreparedRequest(self._upstream, replace(self._prepared, body=body))

    def send(self, method: bytes, target: bytes, headers: bytes, body: bytes, receiver: Receiver) -> Call:
        return self._upstream.send_prepared(self._prepared, headers, receiver)


class _MindsPriority:
    """Receiver of the answer to a request that names its priority. If that is refused, the fault is not the client's:
    the answer becomes one after which it is sent again, without."""

    __slots__ = ("_body", "_dialect", "_head", "_receiver", "_upstream")

    def __init__(self, receiver: Receiver, upstream: DialectUpstream, dialect: Dialect) -> None:
        self._receiver = receiver
        self._upstream = upstream
        self._dialect = dialect
        self._head: ResponseHead | None = None  # of a refusal
        self._body = b""

    def head(self, head: ResponseHead) -> None:
        if 400 <= head.status < 500:
            self._head = head
        else:
            self._receiver.head(head)

    def data(self, data: bytes, is_last: bool) -> None:
        head = self._head
        if head is None:
            self._receiver.data(data, is_last)
            return
        self._body += data
        if not is_last:
            return
        if refuses_priority(self._dialect, head.status, self._body):
            if self._upstream.takes_priority:
                log.warning(
                    "%s:%d does not schedule by priority: send_priority has no effect there",
                    self._upstream.host,
                    self._upstream.port,
                )
            self._upstream.takes_priority = False
            error = EngineUnavailable("the server does not schedule by priority")
            head = ResponseHead(http_error(error).status, _JSON | {b"retry-after": b"1"})
            self._body = error_body(error)
        self._receiver.head(head)
        self._receiver.data(self._body, True)

    def failed(self, failure: Failure) -> None:
        self._receiver.failed(failure)


class _HidesUsage:
    """Receiver of a stream whose client did not ask for its usage."""

    __slots__ = ("_receiver", "_rest")

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._rest: bytes | None = b""  # None: this is no stream

    def head(self, head: ResponseHead) -> None:
        if not head.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._rest = None
        elif b"content-length" in head.headers:
            headers = {name: value for name, value in head.headers.items() if name != b"content-length"}
            head = ResponseHead(head.status, headers)
        self._receiver.head(head)

    def data(self, data: bytes, is_last: bool) -> None:
        if self._rest is not None:
            data = self._rest + data
            end = len(data) if is_last else max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
            whole = end >= 4  # no event is shorter
            self._rest, data = (data[end:], hide_usage(data[:end])) if whole else (data, b"")
        self._receiver.data(data, is_last)

    def failed(self, failure: Failure) -> None:
        self._receiver.failed(failure)


class _Translates:
    """Receiver of an answer of another kind. An error, or a whole answer, is read to its end first."""

    def __init__(
        self, receiver: Receiver, dialect: Dialect, answer: NativeAnswer | ChatAnswer, is_stream: bool
    ) -> None:
        self._receiver = receiver
        self._dialect = dialect
        self._answer = answer
        self._is_stream = is_stream
        self._head: ResponseHead | None = None
        self._body = b""

    def head(self, head: ResponseHead) -> None:
        self._head = head
        if isinstance(self._answer, NativeAnswer):
            self._answer.read_head(head.headers)
        self._is_stream = self._is_stream and head.status == 200
        if self._is_stream:
            self._receiver.head(ResponseHead(200, _EVENTS))

    def data(self, data: bytes, is_last: bool) -> None:
        if self._is_stream:
            translated = self._answer.feed(data)
            self._receiver.data(translated + self._answer.end() if is_last else translated, is_last)
            return
        if len(self._body) <= _MAX_BYTES:
            self._body += data
        if is_last:
            self._tell()

    def failed(self, failure: Failure) -> None:
        self._receiver.failed(failure)

    def _tell(self) -> None:
        assert self._head is not None
        status, headers = self._head.status, self._head.headers
        answer = Answer(status, headers, self._body)
        if status == 200:
            try:
                body = self._answer.whole(self._body)
            except PenstockError as error:
                status, body = http_error(error).status, error_body(error)
        elif isinstance(self._answer, ChatAnswer):  # of a server that speaks OpenAI: an error is as clients know it
            self._receiver.head(self._head)
            self._receiver.data(self._body, True)
            return
        else:
            if judge(self._dialect, answer, time.time()).verdict is Verdict.OVERLOADED:
                status = 429 if status == 429 else 503
            said = self._body[:1000].decode(errors="replace") or f"status {status}"
            body = error_body(EngineFailed(said) if status >= 500 else InvalidRequest(said))
        kept = {name: headers[name] for name in (b"retry-after",) if name in headers}
        self._receiver.head(ResponseHead(status, _JSON | kept))
        self._receiver.data(body, True)
