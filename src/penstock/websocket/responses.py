"""Responses on a socket, as OpenAI's `responses.connect()` speaks them: `response.create` is the request, and its
stream's events come back, each a message.

Requests wait for those before them of the same `stream_id`, a lane; lanes run side by side, and events say theirs.
`response.cancel` is an extension: OpenAI's clients have none.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from penstock.api.responses.request import Kept
from penstock.api.responses.stored import Turn, input_items, with_conversation
from penstock.core.config import shown
from penstock.core.errors import EngineFailed, InvalidRequest, NotFound, PenstockError, UnsupportedParameter
from penstock.websocket.exchange import Headers, SocketExchange
from penstock.websocket.memory import Conversations
from penstock.websocket.session import Session, decode, error_message, is_json, refusal_message

_Lane = Annotated[str, Meta(min_length=1, max_length=128)]
_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_TYPES = "auth, response.create, response.cancel"


class _Create(msgspec.Struct):
    """Members that are the socket's, not the request's."""

    stream_id: _Lane | None = None
    stream: bool | None = None
    background: bool | None = None
    generate: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    input: msgspec.Raw = msgspec.Raw(b'""')


class _Cancel(msgspec.Struct, tag_field="type", tag="response.cancel", forbid_unknown_fields=True):
    response_id: str | None = None
    stream_id: _Lane | None = None


class _Laned(msgspec.Struct):
    stream_id: Any = None


_creates = msgspec.json.Decoder(_Create)
_cancels = msgspec.json.Decoder(_Cancel)
_laned = msgspec.json.Decoder(_Laned)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FINISHED = (b"response.completed", b"response.incomplete")
_SOCKETS = ("type", "stream_id", "generate", "background")


class _Asked(NamedTuple):
    """A request that waits for its turn."""

    message: _Create
    body: bytes  # as HTTP would have it


class ResponsesSession(Session):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._remembered = Conversations(self.lobby.room)
        self._running: dict[str | None, _Answer] = {}  # by lane
        self._waiting: dict[str | None, deque[_Asked]] = {}
        self._num_waiting = 0
        self._is_advancing = False

    @property
    def num_open(self) -> int:
        return len(self._running) + self._num_waiting

    def received(self, kind: str, data: bytes) -> None:
        if kind == "response.create":
            self._create(data)
        elif kind == "response.cancel":
            self._cancel(data)
        elif kind == "response.steer":
            raise UnsupportedParameter("response.steer: responses are not steered here", param="type")
        else:
            raise InvalidRequest(f"type: '{shown(kind)}' is not one of {_TYPES}", param="type")

    def closed(self, code: int) -> None:
        super().closed(code)
        self._remembered.forget_all()

    def cancel_all(self) -> None:
        super().cancel_all()
        self._running.clear()
        self._waiting.clear()
        self._num_waiting = 0

    def ended(self, answer: _Answer) -> None:
        del self._running[answer.lane]
        self.over(answer.exchange)
        self._advance(answer.lane)

    def _create(self, data: bytes) -> None:
        lane = _lane_of(data)
        try:
            self.check_room()
            asked = _request_of(data)
        except PenstockError as error:
            self.send(msgspec.json.encode(error_message(error, **_named(lane))))
            return
        self._waiting.setdefault(lane, deque()).append(asked)
        self._num_waiting += 1
        self._advance(lane)

    def _advance(self, lane: str | None) -> None:
        """The next request of a lane. A loop: many may wait that are refused at once."""
        if self._is_advancing:
            return
        self._is_advancing = True
        while lane not in self._running and (waiting := self._waiting.get(lane)):
            asked = waiting.popleft()
            self._num_waiting -= 1
            turns = self._remembered.up_to(asked.message.previous_response_id)
            answer = self._running[lane] = _Answer(self, lane, asked.message, turns or [])
            try:
                body = asked.body if turns is None else _with_turns(asked, turns)
            except PenstockError as error:
                answer.refused(error)
                continue
            exchange = self.begin(body, answer)
            if exchange.is_open:
                answer.exchange = exchange
            else:
                self.over(exchange)
        self._is_advancing = False
        if not self._waiting.get(lane):
            self._waiting.pop(lane, None)

    def remember(self, response: dict[str, Any], asked: _Create, turns: list[Turn]) -> None:
        """A response that nobody keeps: its client may go on from it as long as it is here."""
        with contextlib.suppress(InvalidRequest):
            self._remembered.remember(
                str(response.get("id")), turns, input_items(asked.input), response.get("output", [])
            )

    def _cancel(self, data: bytes) -> None:
        asked = decode(_cancels, data)
        found = [
            one
            for lane, one in self._running.items()
            if (asked.response_id is None and lane == asked.stream_id)
            or (asked.response_id is not None and one.response_id == asked.response_id)
        ]
        if not found:
            raise NotFound(
                "no response of this socket that runs has this response_id or stream_id", param="response_id"
            )
        answer = found[0]
        del self._running[answer.lane]
        if answer.exchange is not None:
            answer.exchange.cancel()
        answer.cancelled()
        self.over(answer.exchange)
        self._advance(answer.lane)


class _Answer:
    """One response, as messages."""

    def __init__(self, session: ResponsesSession, lane: str | None, asked: _Create, turns: list[Turn]) -> None:
        """`turns`: those before it that its socket remembers."""
        self.lane = lane
        self._asked = asked
        self._turns = turns
        self.response_id = ""
        self.exchange: SocketExchange | None = None
        self._session = session
        self._named = _named(lane)
        self._end = b',"stream_id":%b}' % msgspec.json.encode(lane) if lane is not None else b"}"
        self._begun: dict[str, Any] = {}  # the response, as it was when it began
        self._last_number = -1
        self._is_over = False  # its client was told of the end

    def started(self, headers: Headers) -> None: ...

    def event(self, name: bytes, data: bytes) -> None:
        if self._is_over:
            return
        if not data.startswith(b"{") or not data.endswith(b"}") or not is_json(data):
            self._fail(EngineFailed("the model's server sent an event that is no JSON"))
            return
        if (number := _NUMBER.search(data)) is not None:
            self._last_number = int(number[1])
        if not self._begun and name == b"response.created":
            begun = msgspec.json.decode(data).get("response")
            self._begun = begun if isinstance(begun, dict) else {}
            self.response_id = str(self._begun.get("id", ""))
        if data.startswith(b'{"error"'):
            self._is_over = True
            data = b'{"type":"error",' + data[1:]
        if name in _FINISHED:
            self._finished(msgspec.json.decode(data).get("response"))
        self._session.send(data[:-1] + self._end)

    def comment(self, text: bytes) -> None: ...

    def ended(self) -> None:
        self._session.ended(self)

    def refused(self, error: PenstockError) -> None:
        self._fail(error)
        self._session.ended(self)

    def broken(self) -> None:
        self._fail(EngineFailed("the answer broke off"))
        self._session.ended(self)

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        if status == 200:
            self._fail(EngineFailed("the model's server sent no stream"))
        else:
            self._say(refusal_message(status, headers, body, self._named))
        self._session.ended(self)

    def cancelled(self) -> None:
        """The last event of a response that its client gave up."""
        response = self._begun | {"status": "cancelled"}
        self._say(
            {
                "type": "response.cancelled",
                "sequence_number": self._last_number + 1,
                "response": response if self._begun else None,
                **self._named,
            }
        )

    def _finished(self, response: object) -> None:
        if isinstance(response, dict) and response.get("store") is False:
            self._session.remember(response, self._asked, self._turns)

    def _fail(self, error: PenstockError) -> None:
        if not self._is_over:
            self._is_over = True
            self._say(error_message(error, **self._named))

    def _say(self, message: dict[str, object]) -> None:
        self._session.send(msgspec.json.encode(message))


def _named(lane: str | None) -> dict[str, object]:
    return {} if lane is None else {"stream_id": lane}


def _lane_of(data: bytes) -> str | None:
    """The lane that an answer to this message belongs to, even if the message is wrong."""
    try:
        lane = decode(_laned, data).stream_id
    except InvalidRequest:
        return None
    return lane if isinstance(lane, str) and 0 < len(lane) <= 128 else None


def _with_turns(asked: _Asked, turns: list[Turn]) -> bytes:
    """The request with the conversation before it, which the application does not know."""
    message = asked.message
    kept = Kept(previous_response_id=message.previous_response_id)
    body = with_conversation(asked.body, turns, input_items(message.input), kept)
    if message.store is None:
        return body
    return msgspec.json.encode(decode(_members, body) | {"store": message.store})


def _request_of(data: bytes) -> _Asked:
    """The body that HTTP would have had. Raises for what a socket's request cannot ask."""
    asked = decode(_creates, data)
    if asked.background:
        raise UnsupportedParameter("background: a socket streams; ask over HTTP", param="background")
    if asked.generate is False:
        raise UnsupportedParameter("generate: every response is generated", param="generate")
    if asked.stream is False:
        raise UnsupportedParameter("stream: every response of a socket is streamed", param="stream")
    members = {name: value for name, value in decode(_members, data).items() if name not in _SOCKETS}
    return _Asked(asked, msgspec.json.encode(members | {"stream": True}))
