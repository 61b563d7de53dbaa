"""Streams of responses that are made in the background, with OpenAI's client: read, left, and come back to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.gateway.responses.background import LEASE_S, RENEW_EVERY_S
from penstock.gateway.responses.event_log import EventLog, LogReader, LogRoom, pack, unpack
from penstock.http.exchange import Exchange, NoChannel
from penstock.http.message import Request
from penstock.tenancy.responses import MAX_TRIES, ResponseBook
from penstock.tenancy.store import Store, open_store
from tests.clocks import ManualClock
from tests.gateway.responses.test_service import GREEDY, QUESTION, create, ended, frozen, keeping
from tests.gateway.running import RunningGateway
from tests.server.replica import Replica, serving
from tests.waiting import eventually

STREAM: Any = {"input": QUESTION["content"], "background": True, "stream": True, **GREEDY}
LONG: Any = STREAM | {"max_output_tokens": 60, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'penstock.db'}") as opened:
        yield opened


@pytest.fixture(scope="module")
def gateway(store: Store, replica_at_hand: Replica) -> Iterator[RunningGateway]:
    with keeping(frozen(store), replica_at_hand) as found:
        yield found
        eventually(found.is_idle)


@pytest.fixture(scope="module")
def other(store: Store, replica_at_hand: Replica) -> Iterator[RunningGateway]:
    """Another gateway of the same store."""
    with keeping(frozen(store), replica_at_hand, clock=ManualClock()) as found:
        yield found


def numbers(events: list[Any]) -> list[int]:
    return [event.sequence_number for event in events]


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_a_background_stream_is_read_to_its_end_and_again(
    gateway: RunningGateway, other: RunningGateway, replica_at_hand: Replica
) -> None:
    events: list[Any] = list(gateway.openai.responses.create(**STREAM))
    assert numbers(events) == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    first, last = events[0].response, events[-1].response
    assert {event.response.id for event in events if hasattr(event, "response")} == {first.id}
    assert (first.status, last.status, last.background) == ("queued", "incomplete", True)
    assert text_of(events) == last.output_text == replica_at_hand.answer([QUESTION], 12)
    for one in (gateway, other):  # the store has all of it
        assert one.openai.responses.retrieve(first.id) == last
        assert list(one.openai.responses.retrieve(first.id, stream=True)) == events
        assert list(one.openai.responses.retrieve(first.id, stream=True, starting_after=5)) == events[6:]
        assert list(one.openai.responses.retrieve(first.id, stream=True, starting_after=len(events) - 1)) == []
    eventually(gateway.is_idle)
    assert gateway.ledger.usages[-1].output_tokens == 12
    assert create(gateway.openai, "And?", previous_response_id=first.id).output


def test_a_reader_that_comes_back_gets_every_event_once(store: Store) -> None:
    with serving(step_s=0.01) as slow, keeping(frozen(store), slow) as gateway:
        client = gateway.openai
        stream: Any = client.responses.create(**LONG)
        seen = [next(stream) for _ in range(9)]
        stream.close()
        found: Any = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=8)
        seen += [next(found) for _ in range(20)]
        found.close()
        late: Any = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=28)
        seen += late
        assert numbers(seen) == list(range(len(seen)))
        assert text_of(seen) == seen[-1].response.output_text
        assert list(client.responses.retrieve(seen[0].response.id, stream=True)) == seen


def test_another_gateway_tells_all_events_once_the_response_has_ended(
    store: Store, other: RunningGateway, replica_at_hand: Replica
) -> None:
    with keeping(frozen(store), replica_at_hand) as gateway:
        with replica_at_hand.engine_paused():
            stream: Any = gateway.openai.responses.create(**LONG)
            seen = [next(stream) for _ in range(2)]
            elsewhere: Any = other.openai.responses.retrieve(seen[0].response.id, stream=True, starting_after=1)
        found: list[Any] = []
        reader = threading.Thread(target=lambda: found.extend(elsewhere))
        reader.start()
        seen += stream

        def look() -> bool:
            other.advance(1.0)
            return reader.is_alive()

        eventually(look, lambda is_reading: not is_reading)
        assert seen[:2] + found == seen


def test_a_stream_that_is_cancelled_says_so(store: Store) -> None:
    with serving(step_s=0.01) as slow, keeping(frozen(store), slow) as gateway:
        client = gateway.openai
        stream: Any = client.responses.create(**LONG | {"max_output_tokens": 1500})
        seen = [next(stream) for _ in range(9)]
        assert client.responses.cancel(seen[0].response.id).status == "cancelled"
        seen += stream
        assert (seen[-1].type, numbers(seen)) == ("response.cancelled", list(range(len(seen))))
        eventually(slow.is_idle)
        (again,) = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=5)
        assert (again.type, again.sequence_number) == ("response.cancelled", 6)


def test_a_stream_goes_on_when_its_replica_cannot(store: Store) -> None:
    asked = LONG | {"max_output_tokens": 40}
    with (
        serving(step_s=0.02) as slow,
        serving() as fast,
        keeping(frozen(store), slow, fast, clock=ManualClock()) as gateway,
    ):
        gateway.set_in_use(fast, False)
        stream: Any = gateway.openai.responses.create(**asked)
        seen = [next(stream) for _ in range(9)]
        gateway.set_in_use(fast, True)
        slow.kill_engine()
        seen += stream
        assert numbers(seen) == list(range(len(seen)))
        assert text_of(seen) == seen[-1].response.output_text == fast.answer([QUESTION], 40)


def test_a_stream_of_which_nothing_comes_ends_with_its_error(store: Store, replica_at_hand: Replica) -> None:
    with keeping(frozen(store), replica_at_hand) as gateway:
        client = gateway.client(gateway.add_tenant("small", limits={"requests_per_minute": 1}))
        for wanted in ("response.incomplete", "response.failed"):
            events: list[Any] = list(client.responses.create(**STREAM))
            assert events[-1].type == wanted
        assert events[-1].response.error.code == "rate_limit_exceeded"
        assert numbers(events) == [0, 1, 2]
        assert list(client.responses.retrieve(events[0].response.id, stream=True)) == events


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"stream": "maybe"}, "stream"),
        ({"starting_after": "3"}, "starting_after"),
        ({"stream": "true", "starting_after": "-1"}, "starting_after"),
        ({"stream": "true"}, "stream"),  # it was not made in the background
    ],
)
def test_streams_that_cannot_be_are_refused_by_name(gateway: RunningGateway, query: Any, param: str) -> None:
    kept = create(gateway.openai)
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai.get(f"/responses/{kept.id}", options={"params": query}, cast_to=object)
    assert refused.value.param == param


def test_a_stream_over_which_its_makers_died_ends_with_its_failure(tmp_path: Path, replica_at_hand: Replica) -> None:
    now = [time.time()]
    with open_store(f"sqlite:///{tmp_path / 'penstock.db'}") as store:
        book = ResponseBook(store._database, lambda: now[0])
        with keeping(book, replica_at_hand, clock=ManualClock()) as gateway:
            with replica_at_hand.engine_paused():
                stream: Any = gateway.openai.responses.create(**STREAM)
                seen = [next(stream) for _ in range(2)]
                service: Any = gateway.app.responses._background  # type: ignore[union-attr]
                for made in (service._active, service._logs):
                    gateway.call(made.clear)
                now[0] += LEASE_S
                for _ in range(1, MAX_TRIES):
                    assert book.claim("another that died", 0.0, 1)
                (failed,) = gateway.openai.responses.retrieve(seen[0].response.id, stream=True, starting_after=1)
            assert (failed.type, failed.sequence_number) == ("response.failed", 2)
            eventually(gateway.is_idle)


def test_a_stream_that_another_gateway_makes_anew_ends_with_the_whole_of_it(
    store: Store, replica_at_hand: Replica
) -> None:
    now, clock = [time.time()], ManualClock()
    book = ResponseBook(store._database, lambda: now[0])
    with (
        serving() as stuck,
        keeping(book, stuck, clock=clock) as first,
        keeping(book, replica_at_hand) as second,
        stuck.engine_paused(),
    ):
        stream: Any = first.openai.responses.create(**STREAM)
        seen = [next(stream) for _ in range(2)]
        now[0] += LEASE_S
        second.call(second.app.responses._background._take_over)  # type: ignore[union-attr]
        assert ended(second.openai, seen[0].response.id).status == "incomplete"
        (last,) = second.openai.responses.retrieve(seen[0].response.id, stream=True, starting_after=1)
        assert (last.type, last.sequence_number) == ("response.incomplete", 2)
        assert last.response.output_text == replica_at_hand.answer([QUESTION], 12)
        first.advance(RENEW_EVERY_S)  # it hears that the response is no longer its
        assert list(stream) == [], "its readers come back, and are told by the store"
        eventually(first.is_idle)


# -- the log


class _Recorded(NoChannel):
    """The client of an exchange, which reads when it is told to."""

    def __init__(self) -> None:
        self.read = b""
        self.is_over = False

    def send(self, data: bytes) -> None:
        self.read += data

    def answered(self, close: bool) -> None:
        self.is_over = True


def begun() -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": "queued"}


def delta(number: int) -> bytes:
    return b'event: response.output_text.delta\ndata: {"type":"d","sequence_number":%d,"delta":"x"}\n\n' % number


def reading(log: EventLog, after: int = -1) -> tuple[_Recorded, Exchange]:
    channel = _Recorded()
    exchange = Exchange(channel, Request(b"GET", b"/v1/responses/resp_1", {}, b""), False, False)
    LogReader(exchange, b"", log, after)
    return channel, exchange


def test_a_reader_that_is_slow_holds_nobody_up() -> None:
    log = EventLog(begun(), LogRoom(1 << 20))
    (slow, exchange), (fast, _) = reading(log), reading(log, after=1)
    assert exchange.watcher is not None
    exchange.watcher.pause()
    for number in range(200):
        log.add(delta(number))
    assert (slow.read.count(b"event: "), fast.read.count(b"event: ")) == (2, 200)
    exchange.watcher.resume()
    log.finish(begun() | {"status": "completed"})
    assert (slow.read.count(b"event: "), slow.is_over, fast.is_over) == (203, True, True)
    assert b'"sequence_number":202,' in slow.read


def test_a_log_that_has_no_room_tells_its_readers_the_end_alone() -> None:
    room = LogRoom(8 * 1000)
    log = EventLog(begun(), room)
    early, _ = reading(log)
    while not log.is_cut:
        log.add(delta(0))
    num_read = early.read.count(b"event: ")
    late, _ = reading(log, after=3)
    log.add(delta(0))
    assert (room.held_bytes, log.packed(begun())) == (0, None)
    log.finish(begun() | {"status": "completed"})
    for client, number in ((early, num_read), (late, 4)):
        assert client.is_over
        assert client.read.endswith(b'"status":"completed"}}\n\n')
        assert b'"type":"response.completed","sequence_number":%d,' % number in client.read


def test_events_are_packed_for_the_store() -> None:
    frames = [delta(number) for number in range(5)]
    assert unpack(pack(frames)) == frames


def test_openai_clients_helpers_come_back_to_a_stream(gateway: RunningGateway, replica_at_hand: Replica) -> None:
    client = gateway.openai
    with client.responses.stream(input=QUESTION["content"], background=True, **GREEDY) as stream:
        events: Any = iter(stream)
        seen: list[Any] = [next(events) for _ in range(7)]
    response_id = seen[0].response.id
    with client.responses.stream(response_id=response_id, starting_after=seen[-1].sequence_number) as stream:
        seen += stream
    assert numbers(seen) == list(range(len(seen)))
    assert seen[-1].response.output_text == replica_at_hand.answer([QUESTION], 12)
