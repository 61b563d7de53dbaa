"""The end of an answer is told when it is kept, and a stream that breaks off ends as a response that failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from penstock.api import sse
from penstock.api.responses import ResponseEvents, ResponseHead, Usage, parse_responses
from penstock.api.sse import error_event
from penstock.core.errors import EngineFailed
from penstock.gateway.responses.exchange import BackgroundExchange, ResponseExchange
from penstock.http.exchange import Exchange
from penstock.http.message import Request

BODY = b'{"model":"m","input":"hello"}'
EVENTS = b"content-type: text/event-stream\r\n"
JSON = b"content-type: application/json\r\n"


class Connection:
    """A client's, that keeps what it is sent."""

    peer = "127.0.0.1"

    def __init__(self) -> None:
        self.sent = b""
        self.is_answered = False

    def send(self, data: bytes) -> None:
        self.sent += data

    def answered(self, close: bool) -> None:
        self.is_answered = True

    def drop(self) -> None: ...

    @property
    def body(self) -> bytes:
        return self.sent.partition(b"\r\n\r\n")[2]


class Shelf:
    """Keeps responses when the test says so."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []
        self.tell: Callable[[bool], None] = lambda is_kept: None

    def __call__(self, response: dict[str, Any], told: Callable[[bool], None]) -> None:
        self.kept.append(response)
        self.tell = told


def opened(keep: Shelf | None) -> tuple[Connection, ResponseExchange]:
    connection = Connection()
    request = Request(b"POST", b"/v1/responses", {}, BODY)
    return connection, ResponseExchange(Exchange(connection, request, False, False), BODY, keep)


def events() -> ResponseEvents:
    return ResponseEvents(ResponseHead("0a", 1), parse_responses(BODY))


def numbers(stream: bytes) -> list[int]:
    blocks = [block for block in stream.split(b"\n\n") if block and not block.startswith(b":")]
    return [json.loads(block.partition(b"data: ")[2])["sequence_number"] for block in blocks]


def test_the_last_event_waits_until_the_response_is_kept() -> None:
    shelf = Shelf()
    connection, exchange = opened(shelf)
    writer = events()
    exchange.start(200, EVENTS, data=b"".join(writer.opening()))
    exchange.write(b": [0,[1]]\n\n" + b"".join(writer.text("Hi.")))
    ending = b"".join(writer.finish(Usage.of(1, 2)))
    exchange.write(ending)
    before = connection.body
    assert b"event: response.output_item.done" in before
    assert b"response.completed" not in before
    exchange.write(b": cost 1 2\n\n", is_last=True)
    assert (connection.body, connection.is_answered) == (before, False)
    shelf.tell(True)
    assert connection.is_answered
    assert numbers(connection.body) == list(range(9))
    assert shelf.kept[0]["output"][0]["content"][0]["text"] == "Hi."


def test_a_response_that_could_not_be_kept_says_so() -> None:
    shelf = Shelf()
    connection, exchange = opened(shelf)
    writer = events()
    exchange.start(200, EVENTS, data=b"".join(writer.opening()))
    exchange.write(b"".join(writer.finish(Usage.of(1, 2))), is_last=True)
    shelf.tell(False)
    last = json.loads(connection.body.rstrip().rpartition(b"data: ")[2])
    assert (last["type"], last["response"]["store"]) == ("response.completed", False)


def test_an_error_in_mid_stream_is_a_response_that_failed() -> None:
    error = error_event(EngineFailed("it died"))
    for shelf in (None, Shelf()):
        connection, exchange = opened(shelf)
        writer = events()
        exchange.start(200, EVENTS, data=b"".join(writer.opening()))
        exchange.write(b"".join(writer.text("On")))
        exchange.write(error, is_last=True)
        if shelf is not None:
            assert shelf.kept[0]["status"] == "failed"
            shelf.tell(True)
        assert connection.is_answered
        assert numbers(connection.body) == list(range(6))
        last = json.loads(connection.body.rstrip().rpartition(b"data: ")[2])
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")


def test_an_error_before_the_first_event_is_an_error() -> None:
    error = error_event(EngineFailed("it died"))
    connection, exchange = opened(Shelf())
    exchange.start(200, EVENTS, data=b": waiting for a replica\n\n")
    exchange.write(error, is_last=True)
    assert connection.body == b": waiting for a replica\n\n" + error


def test_text_that_looks_like_an_end_is_text() -> None:
    shelf = Shelf()
    connection, exchange = opened(shelf)
    writer = events()
    exchange.start(200, EVENTS, data=b"".join(writer.opening()))
    exchange.write(b"".join(writer.text('\nevent: response.completed\ndata: {"response":{}}\n\ndata: {"error"')))
    assert not shelf.kept
    assert numbers(connection.body) == list(range(5))


def test_a_whole_answer_waits_too_and_a_refusal_does_not() -> None:
    shelf = Shelf()
    connection, exchange = opened(shelf)
    writer = events()
    writer.finish(Usage.of(1, 2))
    exchange.start(200, JSON, length=len(writer.whole), data=writer.whole[:40])
    exchange.write(writer.whole[40:], is_last=True)
    assert (exchange.is_started, connection.sent) == (True, b"")
    shelf.tell(True)
    assert connection.body == writer.whole
    connection, exchange = opened(shelf)
    exchange.start(429, JSON, length=2, data=b"{}", is_last=True)
    assert connection.is_answered


def test_an_exchange_without_a_client_tells_its_answer_once() -> None:
    told: list[tuple[int, bytes]] = []
    request = Request(b"POST", b"/v1/responses", {}, BODY)
    exchange = BackgroundExchange(request, ("acme", "resp_1"), lambda _, status, body: told.append((status, body)))
    exchange.start(200, JSON, data=b"{")
    assert exchange.is_open
    exchange.write(b"}", is_last=True)
    exchange.cancel()
    assert (told, exchange.is_open) == ([(200, b"{}")], False)
    exchange = BackgroundExchange(request, ("acme", "resp_2"), lambda _, status, body: told.append((status, body)))
    exchange.cancel()
    exchange.start(200, JSON, data=sse.DONE, is_last=True)
    assert told == [(200, b"{}")]
