"""Chat on a socket: many requests at a time, each with an id that its client chose.

    client  auth, request, cancel
    server  authenticated; of a request: started, chunk …, done; or response; or error; or cancelled; and waiting

An error with an id ends that request. One without is about a message that no request came of.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.core.config import shown
from penstock.core.errors import Conflict, EngineFailed, InvalidRequest, NotFound, PenstockError
from penstock.websocket.exchange import Headers, SocketExchange
from penstock.websocket.session import REQUEST_HEADERS, Session, decode, error_message, is_json, refusal_message

_MAX_ID = 128
_Id = Annotated[str, Meta(min_length=1, max_length=_MAX_ID)]


class _Request(msgspec.Struct, tag_field="type", tag="request", forbid_unknown_fields=True):
    id: _Id
    body: msgspec.Raw
    headers: dict[str, str] = {}


class _Cancel(msgspec.Struct, tag_field="type", tag="cancel", forbid_unknown_fields=True):
    id: _Id


class _Named(msgspec.Struct):
    id: Any = None


_TYPES = "auth, request, cancel"
_messages: dict[str, msgspec.json.Decoder[Any]] = {
    "request": msgspec.json.Decoder(_Request),
    "cancel": msgspec.json.Decoder(_Cancel),
}
_named = msgspec.json.Decoder(_Named)


class ChatSession(Session):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._answers: dict[str, _Answer] = {}

    def received(self, kind: str, data: bytes) -> None:
        if (decoder := _messages.get(kind)) is None:
            raise InvalidRequest(f"type: '{shown(kind)}' is not one of {_TYPES}", param="type")
        try:
            message = decode(decoder, data)
        except InvalidRequest as error:
            self._refuse(self._fresh_id(data) if kind == "request" else None, error)
            return
        if isinstance(message, _Cancel):
            self._cancel(message.id)
        elif message.id in self._answers:
            raise Conflict(f"id: request '{shown(message.id)}' of this socket is open", param="id")
        else:
            self._ask(message)

    def cancel_all(self) -> None:
        super().cancel_all()
        self._answers.clear()

    def ended(self, answer: _Answer) -> None:
        del self._answers[answer.id]
        self.over(answer.exchange)

    def _ask(self, message: _Request) -> None:
        try:
            self.check_room()
            for name, value in message.headers.items():
                if name.lower() not in REQUEST_HEADERS or not value.isprintable() or not value.isascii():
                    problem = f"headers: '{shown(name)}' is not one that a message can have, or its value is no text"
                    raise InvalidRequest(
                        f"{problem}; it can have {', '.join(sorted(REQUEST_HEADERS))}", param="headers"
                    )
        except PenstockError as error:
            self._refuse(message.id, error)
            return
        answer = self._answers[message.id] = _Answer(self, message.id)
        exchange = self.begin(bytes(message.body), answer, message.headers)
        if exchange.is_open:
            answer.exchange = exchange
        else:
            self.over(exchange)

    def _cancel(self, request_id: str) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is None:
            raise NotFound(f"id: no request '{shown(request_id)}' of this socket is open", param="id")
        if answer.exchange is not None:
            answer.exchange.cancel()
        self.send(b'{"type":"cancelled","id":%b}' % answer.encoded_id)
        self.over(answer.exchange)

    def _fresh_id(self, data: bytes) -> str | None:
        """The id of a message that is wrong elsewhere, if its error can be told by it."""
        try:
            request_id = decode(_named, data).id
        except InvalidRequest:
            return None
        is_fit = isinstance(request_id, str) and 0 < len(request_id) <= _MAX_ID
        return request_id if is_fit and request_id not in self._answers else None

    def _refuse(self, request_id: str | None, error: PenstockError) -> None:
        if request_id is None:
            raise error
        self.send(msgspec.json.encode(error_message(error, id=request_id)))


class _Answer:
    """The answer to one request, as messages."""

    def __init__(self, session: ChatSession, request_id: str) -> None:
        self.id = request_id
        self.encoded_id = msgspec.json.encode(request_id)
        self.exchange: SocketExchange | None = None  # None: it is being handed over, or has ended meanwhile
        self._session = session
        self._is_told = False  # of an error that ends it
        self._chunk = b'{"type":"chunk","id":%b,"data":' % self.encoded_id

    def started(self, headers: Headers) -> None:
        self._say({"type": "started", "id": self.id, "headers": headers})

    def event(self, name: bytes, data: bytes) -> None:
        if data == b"[DONE]" or self._is_told:
            return
        if not is_json(data):
            self._fail(EngineFailed("the model's server sent an event that is no JSON"))
        elif data.startswith(b'{"error"'):
            self._is_told = True
            self._session.send(b'{"type":"error","id":%b,%b' % (self.encoded_id, data[1:]))
        else:
            self._session.send(self._chunk + data + b"}")

    def comment(self, text: bytes) -> None:
        if text.startswith(b"waiting"):
            self._say({"type": "waiting", "id": self.id, "message": text.decode(errors="replace")})

    def ended(self) -> None:
        if not self._is_told:
            self._session.send(b'{"type":"done","id":%b}' % self.encoded_id)
        self._session.ended(self)

    def broken(self) -> None:
        self._fail(EngineFailed("the answer broke off"))
        self._session.ended(self)

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        if status != 200:
            self._say(refusal_message(status, headers, body, {"id": self.id, "headers": headers}))
        elif is_json(body):
            self._say({"type": "response", "id": self.id, "headers": headers, "body": msgspec.Raw(body)})
        else:
            self._fail(EngineFailed("the model's server sent an answer that is no JSON"))
        self._session.ended(self)

    def _fail(self, error: PenstockError) -> None:
        if not self._is_told:
            self._is_told = True
            self._say(error_message(error, id=self.id))

    def _say(self, message: dict[str, object]) -> None:
        self._session.send(msgspec.json.encode(message))
