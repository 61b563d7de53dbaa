"""What pushes, against a receiver on the official protobufs: what arrives, what is tried again, what is lost."""

from __future__ import annotations

import socket
import threading

import pytest

from penstock.core.settings import TelemetrySettings
from penstock.observe.catalog import Metric
from penstock.observe.otlp.exporter import MetricExporter, RetryTimes, Sender, TraceExporter
from penstock.observe.otlp.target import Target, telemetry
from penstock.observe.otlp.transport import Busy
from penstock.observe.registry import Registry
from penstock.observe.spans import Kind, Span
from penstock.observe.trace_context import TraceContext
from tests.observe.otlp.sink import SINKS, http_sink, points
from tests.virtual_time import SteppedClock
from tests.waiting import GIVE_UP_S, eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"
PATIENT = RetryTimes(first_pause_s=0.01, goodbye_s=GIVE_UP_S)
WHO = {"service.name": "test"}


def target(url: str, protocol: str, **environment: str) -> Target:
    settings = TelemetrySettings(endpoint=url, protocol=protocol)  # type: ignore[arg-type]
    environment = {"TIMEOUT": f"{1e3 * GIVE_UP_S:.0f}"} | environment
    found = telemetry(settings, "test", {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in environment.items()})
    assert found.traces is not None
    return found.traces


def span(number: int) -> list[Span]:
    attributes = {"text": "ä", "number": 1, "share": 0.5, "is": True, "many": ["a", "b"], "scores": [0.5, 1.0]}
    link = TraceContext("ab" * 16, "cd" * 8, True)
    return [Span("one", Kind.SERVER, TRACE, f"{number:016x}", "", 10, 20, attributes, "broke", b"a=1", True, link)]


@pytest.mark.parametrize("protocol", SINKS)
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_spans_arrive_as_they_were_made(protocol: str, compression: str) -> None:
    with SINKS[protocol]() as sink:
        way = target(sink.url, protocol, HEADERS="Api-Key=secret", COMPRESSION=compression)
        with TraceExporter[int](way, WHO, span, times=PATIENT) as exporter:
            for number in range(1, 121):
                exporter.put(number)
        assert exporter.num_lost == 0
        found = sink.spans
        assert [int(one.span_id, 16) for one in found] == list(range(1, 121))
        one = found[0]
        assert (one.name, one.service, one.trace_id, one.kind) == ("one", "test", TRACE, Kind.SERVER)
        assert (one.start_ns, one.end_ns, one.error, one.state) == (10, 20, "broke", "a=1")
        assert one.attributes == {
            "text": "ä",
            "number": 1,
            "share": 0.5,
            "is": True,
            "many": ["a", "b"],
            "scores": [0.5, 1.0],
        }
        assert one.links == ["ab" * 16]
        assert sink.headers[0]["api-key"] == "secret"


def test_a_receiver_that_is_busy_is_asked_again_and_nothing_is_lost() -> None:
    with http_sink() as sink:
        sink.statuses = [503, 429]
        with TraceExporter[int](target(sink.url, "http/protobuf"), WHO, span, times=PATIENT) as exporter:
            exporter.put(1)
            sink.wait_for(1)
        assert (exporter.num_lost, len(sink.headers)) == (0, 3)


def test_what_the_receiver_will_never_take_is_lost_and_counted() -> None:
    with http_sink() as sink:
        sink.statuses = [400]
        with TraceExporter[int](target(sink.url, "http/protobuf"), WHO, span, times=PATIENT) as exporter:
            exporter.put(1)
        assert (exporter.num_lost, len(sink.headers)) == (1, 1)


@pytest.mark.parametrize("protocol", SINKS)
def test_where_nobody_listens_all_is_lost_and_nobody_waits(protocol: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        way = target(f"http://127.0.0.1:{taken.getsockname()[1]}", protocol)
        with TraceExporter[int](way, WHO, span) as exporter:
            for number in range(12_000):  # no more than so many wait, whatever becomes of them
                exporter.put(number)
        assert exporter.num_lost == 12_000


class BusyReceiver:
    """It is busy for ever. Each try takes a second of the test's own time, and so do pauses as long as they are."""

    def __init__(self) -> None:
        self.clock = SteppedClock()
        self.tries: list[tuple[float, float]] = []  # when, and how long each might take
        self.stopping = threading.Event()
        self.stopping.wait = self._wait  # type: ignore[assignment, method-assign]

    def send(self, message: bytes, timeout_s: float) -> bytes:
        self.tries.append((self.clock() - 1000.0, timeout_s))
        self.clock.advance(1.0)
        raise Busy("busy")

    def close(self) -> None: ...

    def _wait(self, seconds: float) -> bool:
        if not self.stopping.is_set():
            self.clock.advance(seconds)
        return self.stopping.is_set()


def test_a_message_is_tried_with_growing_pauses_until_its_time_is_over() -> None:
    way = BusyReceiver()
    sender = Sender(way, 20.0, way.stopping, RetryTimes(first_pause_s=0.5, longest_pause_s=5.0), way.clock)
    with pytest.raises(Busy):
        sender.send(b"")
    assert way.tries == [(0.0, 20.0), (1.5, 18.5), (3.5, 16.5), (6.5, 13.5), (11.5, 8.5), (17.5, 2.5)]
    assert way.clock() - 1000.0 <= 20.0


def test_all_that_is_left_at_the_end_is_tried_once_within_two_seconds() -> None:
    assert RetryTimes().goodbye_s == 2.0
    way = BusyReceiver()
    sender = Sender(way, 20.0, way.stopping, RetryTimes(), way.clock)
    way.stopping.set()
    for _ in range(10):
        with pytest.raises((Busy, TimeoutError)):
            sender.send(b"")
    assert way.tries == [(0.0, 2.0), (1.0, 1.0)]
    assert way.clock() - 1000.0 == 2.0


@pytest.mark.parametrize("protocol", SINKS)
def test_metrics_arrive_at_the_interval_and_once_more_at_the_end(protocol: str) -> None:
    counter = Metric("penstock_things_total", "counter", "Things.", ("kind",))
    gauge = Metric("penstock_level", "gauge", "A level.")
    waits = Metric("penstock_wait_seconds", "histogram", "Waits.", (), (0.1, 1.0))
    registry = Registry((counter, gauge, waits))
    registry.count(counter, "a").value = 3
    registry.count(gauge).value = 0.5
    for value in (0.05, 0.5, 3.0):
        registry.spread(waits).observe(value)
    with SINKS[protocol]() as sink:
        with MetricExporter(target_of_metrics(sink.url, protocol), WHO, lambda: [registry], 0.05, times=PATIENT):
            eventually(lambda: sink.metrics)
            registry.count(counter, "a").value = 4
        found = sink.metrics
        ((said, point),) = points(found["test penstock.things"])
        assert (said, point.as_double) == ({"penstock.kind": "a"}, 4)
        assert found["test penstock.things"].sum.is_monotonic
        assert points(found["test penstock.level"])[0][1].as_double == 0.5
        ((_, spread),) = points(found["test penstock.wait"])
        assert (list(spread.bucket_counts), list(spread.explicit_bounds)) == ([1, 1, 1], [0.1, 1.0])
        assert (spread.count, spread.sum, found["test penstock.wait"].unit) == (3, 3.55, "s")
        assert spread.start_time_unix_nano < spread.time_unix_nano


def target_of_metrics(url: str, protocol: str) -> Target:
    found = telemetry(TelemetrySettings(endpoint=url, protocol=protocol), "test", {})  # type: ignore[arg-type]
    assert found.metrics is not None
    return found.metrics
