"""What a request is charged, while it goes on and at its end."""

from __future__ import annotations

from penstock.api.relay import Origin, StreamRecord, origin_comment
from penstock.core.request import Cost
from penstock.gateway.proxy.request_view import SURFACES, RequestView
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.records.charge import RequestCharge
from penstock.gateway.records.token_usage import TokenUsage
from penstock.http.exchange import Exchange
from penstock.http.message import Request
from penstock.router.routes import PoolShare, Route
from penstock.tenancy.keys import Caller
from penstock.tenancy.prices import Price
from penstock.tenancy.tenants import Tenant
from penstock.tenancy.usage import Usage
from tests.clocks import ManualClock

EVERY_S = 1.0


class Client:
    def send(self, data: bytes) -> None: ...
    def answered(self, close: bool) -> None: ...
    def drop(self) -> None: ...


class Book:
    def __init__(self) -> None:
        self.usages: list[Usage] = []

    def record(self, usage: Usage) -> None:
        self.usages.append(usage)


def routed() -> RoutedRequest:
    request = Request(b"POST", b"/v1/chat/completions", {}, b"{}")
    return RoutedRequest(
        "ab",
        Exchange(Client(), request, True, True),
        SURFACES[request.path],
        Caller(Tenant(id="acme"), "key"),
        RequestView(model="m", stream=True),
        Route("m", (PoolShare("m"),)),
        0.5,
        0.5,
    )


def record_of(num_tokens: int) -> StreamRecord:
    record = StreamRecord()
    record.append(origin_comment(Origin("0", 1, 2, prompt_tokens=30)))
    for token_id in range(num_tokens):
        record.append(b": [0,[%d]]\n\ndata: {}\n\n" % token_id)
    return record


def test_a_stream_is_charged_every_second_and_the_parts_are_the_whole() -> None:
    book, told, clock = Book(), list[int](), ManualClock()
    charge = RequestCharge(book, {"m": Price(input=1.0, output=2.0)}, routed(), clock)
    record = record_of(5)
    charge.follow(record, "m", told.append)
    clock.advance(EVERY_S)
    assert [(u.request_id, u.input_tokens, u.output_tokens, u.requests) for u in book.usages] == [("ab/1", 30, 5, 0)]
    record.append(b": [0,[7,8]]\n\ndata: {}\n\n")
    clock.advance(EVERY_S)
    assert len(book.usages) == 2
    charge.close("m", TokenUsage(30, 9, cached_tokens=16))
    clock.advance(10 * EVERY_S)
    assert [(u.request_id, u.input_tokens, u.output_tokens, u.requests) for u in book.usages[1:]] == [
        ("ab/2", 0, 2, 0),
        ("ab", 0, 2, 1),
    ]
    assert told == [35, 37]
    assert sum(u.cost_nanos for u in book.usages) == Price(input=1.0, output=2.0).nanos(30, 16, 9)
    assert sum(u.cached_tokens for u in book.usages) == 16


def test_device_time_is_charged_once_with_the_last_part() -> None:
    book, price, clock = Book(), Price(output=2.0, replica_hour=3.6), ManualClock()
    charge = RequestCharge(book, {"m": price}, routed(), clock)
    charge.follow(record_of(5), "m", None)
    clock.advance(EVERY_S)
    usage = TokenUsage(30, 9, work=Cost(2.0, 0.5))
    charge.close("m", usage)
    assert [(u.device_us, u.kv_block_ms) for u in book.usages] == [(0, 0), (2_000_000, 500)]
    assert sum(u.cost_nanos for u in book.usages) == 9 * 2000 + 2_000_000 == usage.nanos(price)
    assert charge.cost("m") == (9 * 2000 + 2_000_000) / 1e9


def test_a_short_request_is_charged_once() -> None:
    book, clock = Book(), ManualClock()
    charge = RequestCharge(book, {}, routed(), clock)
    charge.follow(record_of(3), "m", None)
    charge.close("m", TokenUsage(30, 3))
    clock.advance(10 * EVERY_S)
    assert [(u.request_id, u.tokens, u.requests) for u in book.usages] == [("ab", 33, 1)]
