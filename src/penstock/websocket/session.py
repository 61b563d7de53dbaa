"""The base of sessions on a socket: a key, requests that are open together, and the end.

Each request is an exchange inside the process: the application answers it as it answers HTTP, so limits, bills, queues,
routing and failover are HTTP's. The key is checked for each of them anew. A subclass knows the messages.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import msgspec

from penstock.api.decoding import explain
from penstock.api.errors import error_body, error_headers, http_error
from penstock.api.relay import SECRET_HEADER
from penstock.core.errors import (
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PenstockError,
    Unauthenticated,
)
from penstock.http.exchange import Exchange
from penstock.http.message import Request
from penstock.websocket.exchange import Answer, Headers, SocketExchange
from penstock.websocket.frames import CloseCode
from penstock.websocket.memory import Room
from penstock.websocket.settings import WebSocketSettings
from penstock.websocket.socket import WebSocket

log = logging.getLogger("penstock.websocket")

App = Callable[[Exchange], None]
Lines = Mapping[bytes, bytes]

# Of headers of the handshake, those that are about the connection, or are a request's own.
_NOT_PASSED_ON = frozenset(
    b"connection upgrade keep-alive te trailer transfer-encoding content-length content-type expect "
    b"accept-encoding x-request-id idempotency-key".split()
)
# A handshake cannot have these for a request, and a browser none at all: a message may.
REQUEST_HEADERS = frozenset(
    ("x-request-id", "traceparent", "tracestate", "x-penstock-expected-output", "x-penstock-max-wait")
)
_OWN = frozenset((SECRET_HEADER.encode(), *(name.encode() for name in REQUEST_HEADERS)))
_DRAINING_S = 1.0


class Lobby(Protocol):
    """Where sessions come from: it knows callers, and counts."""

    settings: WebSocketSettings
    room: Room
    app: App

    def owner_of(self, headers: Lines, peer: str) -> str:
        """The tenant whose key is in these headers; empty where nobody needs one. Raises."""

    def enter(self, session: Session, owner: str) -> None:
        """Counts a session as its tenant's. Raises Overloaded if it has too many."""

    def leave(self, session: Session, code: int) -> None: ...
    def counted(self, session: Session, is_sent: bool) -> None: ...


class ErrorText(msgspec.Struct):
    """An answer that is an error, as far as it is one."""

    error: msgspec.Raw


_errors = msgspec.json.Decoder(ErrorText)


class Session(ABC):
    """The listener of a socket."""

    def __init__(self, lobby: Lobby, handshake: Request, socket: WebSocket, owner: str | None) -> None:
        """`owner`: None: nobody has been named yet, so the first message has a key."""
        self.path = handshake.path
        self.owner = owner
        self.num_requests = self.num_received = self.num_sent = 0
        self.lobby = lobby
        self.socket = socket
        self._headers = {name: value for name, value in handshake.headers.items() if _is_passed_on(name)}
        self._has_key = any(name in self._headers for name in (b"authorization", b"x-api-key"))
        self._exchanges: set[SocketExchange] = set()
        self._is_draining = False
        self.began_at = 0.0
        self._due_at = 0.0  # for a key, or for the next request

    # -- for subclasses

    @abstractmethod
    def received(self, kind: str, data: bytes) -> None:
        """Takes a message, by its type. Raises what is wrong with it."""

    def send_error(self, error: PenstockError) -> None:
        """Tells the client of a message that could not be understood."""
        self.send(msgspec.json.encode(error_message(error)))

    @property
    def num_open(self) -> int:
        """Requests that run or wait."""
        return len(self._exchanges)

    def cancel_all(self) -> None:
        """Gives up all that runs or waits, and says nothing of it."""
        exchanges, self._exchanges = self._exchanges, set()
        for exchange in exchanges:
            exchange.cancel()

    def send(self, message: bytes) -> None:
        self.num_sent += 1
        self.lobby.counted(self, True)
        self.socket.send(message)

    def check_room(self) -> None:
        """Raises for one request more than may be open."""
        most = self.lobby.settings.max_requests
        if self._is_draining:
            problem = "this server is stopping: connect again"
            raise EngineUnavailable(problem, reason="draining", retry_after_s=_DRAINING_S)
        if self.num_open >= most:
            problem = f"{most} requests of this socket are open already"
            raise Overloaded(problem, reason="socket_requests", retry_after_s=1.0)

    def begin(self, body: bytes, answer: Answer, headers: Mapping[str, str] | None = None) -> SocketExchange:
        """Sends a request to the application. Its answer may be told before this returns."""
        self.num_requests += 1
        own = {name.lower().encode(): value.encode() for name, value in (headers or {}).items()}
        length = b"%d" % len(body)
        lines = self._headers | own | {b"content-type": b"application/json", b"content-length": length}
        exchange = SocketExchange(Request(b"POST", self.path, lines, body), self.socket, answer)
        self._exchanges.add(exchange)
        try:
            self.lobby.app(exchange)
        except PenstockError as error:
            _give_up(exchange, error)
        except Exception:
            log.exception("a request of a socket at %s failed", self.path.decode(errors="replace"))
            _give_up(exchange, PenstockError("internal error"))
        return exchange

    def over(self, exchange: SocketExchange | None) -> None:
        """A request has ended."""
        if exchange is not None:
            self._exchanges.discard(exchange)
        self._wait()
        if self._is_draining and not self.num_open:
            self.socket.close(CloseCode.GOING_AWAY, "this server is stopping")

    # -- the socket's side

    def opened(self) -> None:
        self.began_at = self.socket.now
        self._wait()

    def message(self, data: bytes) -> None:
        self.num_received += 1
        self.lobby.counted(self, False)
        try:
            kind = _type_of(data)
            if kind == "auth":
                self._authenticate(data)
            elif self.owner is None:
                raise Unauthenticated('the first message is {"type":"auth","key":"psk_…"}, where no header has a key')
            else:
                self.received(kind, data)
                self._wait()
        except Unauthenticated as error:
            self.send_error(error)
            self.socket.close(CloseCode.POLICY_VIOLATION, error.code)
        except PenstockError as error:
            self.send_error(error)
            if self.owner is None:
                self.socket.close(CloseCode.POLICY_VIOLATION, error.code)
        except Exception:
            log.exception("a message at %s failed", self.path.decode(errors="replace"))
            self.socket.close(CloseCode.INTERNAL_ERROR, PenstockError.code)

    def pause(self) -> None:
        for exchange in list(self._exchanges):
            exchange.pause()

    def resume(self) -> None:
        for exchange in list(self._exchanges):
            exchange.resume()

    def sweep(self, now: float) -> None:
        if self.num_open or now < self._due_at:
            return
        if self.owner is None:
            self.socket.close(CloseCode.POLICY_VIOLATION, "no key came")
        else:
            self.socket.close(CloseCode.GOING_AWAY, "idle")

    def drain(self) -> None:
        self._is_draining = True
        self.over(None)

    def closed(self, code: int) -> None:
        self.cancel_all()
        self.lobby.leave(self, code)

    # -- inside

    def _wait(self) -> None:
        settings = self.lobby.settings
        self._due_at = self.socket.now + (settings.auth_timeout_s if self.owner is None else settings.idle_timeout_s)

    def _authenticate(self, data: bytes) -> None:
        key = decode(_auth, data).key
        if not key or not key.isprintable() or not key.isascii():
            raise InvalidRequest("key: expected an API key", param="key")
        if self._has_key:
            raise Conflict("this socket has a key already")
        headers = self._headers | {b"authorization": b"Bearer " + key.encode()}
        owner = self.lobby.owner_of(headers, self.socket.peer)
        if self.owner is None:
            self.lobby.enter(self, owner)
            self.owner = owner
            self.socket.belongs_to(owner)
        self._headers, self._has_key = headers, True
        self._wait()
        self.send(b'{"type":"authenticated"}')


class _Auth(msgspec.Struct, tag_field="type", tag="auth", forbid_unknown_fields=True):
    key: str


class _Typed(msgspec.Struct):
    type: str


_auth = msgspec.json.Decoder(_Auth)
_typed = msgspec.json.Decoder(_Typed)


def error_message(error: PenstockError, **members: object) -> dict[str, object]:
    """An error as a message: what HTTP would have said in status, Retry-After and body."""
    inner = _errors.decode(error_body(error)).error
    message: dict[str, object] = {"type": "error", **members, "status": http_error(error).status, "error": inner}
    retry_after = dict(error_headers(error)).get(b"retry-after")
    return message if retry_after is None else message | {"retry_after": int(retry_after)}


def refusal_message(status: int, headers: Headers, body: bytes, members: dict[str, object]) -> dict[str, object]:
    """An answer that is an error, as a message with these members."""
    try:
        inner = _errors.decode(body).error
    except msgspec.DecodeError:
        said = f"the model's server answered with status {status}"
        inner = msgspec.Raw(
            msgspec.json.encode({"message": said, "type": "server_error", "param": None, "code": "engine_failed"})
        )
    message: dict[str, object] = {"type": "error", **members, "status": status, "error": inner}
    wait = headers.get("retry-after", "")
    return message | {"retry_after": int(wait)} if wait.isdigit() else message


def is_json(data: bytes) -> bool:
    """Whether a message can hold it. A server of another kind may send anything."""
    try:
        data.decode()
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


T = TypeVar("T")


def decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """A message, or what of it is asked for. Raises InvalidRequest."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise explain(error, decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the message is not valid JSON: {error}") from None


def _is_passed_on(name: bytes) -> bool:
    """Whether requests have this header of the handshake. What gateways say to replicas is for HTTP alone."""
    if name.startswith((b"sec-websocket-", b"x-penstock")):
        return name in _OWN
    return name not in _NOT_PASSED_ON


def _type_of(data: bytes) -> str:
    try:
        return _typed.decode(data).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest('a message is a JSON object with a "type"', param="type") from None


def _give_up(exchange: SocketExchange, error: PenstockError) -> None:
    if exchange.is_started:
        exchange.abort()
    else:
        exchange.refuse(error)
