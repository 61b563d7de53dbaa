"""What pushes, against a receiver on the official protobufs: what arrives, what is tried again, what is lost."""

from __future__ import annotations

import socket
import time

import pytest

from penstock.core.settings import TelemetrySettings
from penstock.observe.catalog import Metric
from penstock.observe.otlp.exporter import MetricExporter, TraceExporter
from penstock.observe.otlp.target import Target, telemetry
from penstock.observe.spans import Kind, Span
from penstock.observe.tallies import Tallies
from penstock.observe.trace_context import TraceContext
from tests.observe.otlp.sink import SINKS, http_sink, points

TRACE = "0af7651916cd43dd8448eb211c80319c"
WHO = {"service.name": "test"}


def target(url: str, protocol: str, **environment: str) -> Target:
    settings = TelemetrySettings(endpoint=url, protocol=protocol)  # type: ignore[arg-type]
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
        with TraceExporter[int](way, WHO, span) as exporter:
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
        with TraceExporter[int](target(sink.url, "http/protobuf"), WHO, span) as exporter:
            exporter.put(1)
            sink.wait_for(1)
        assert (exporter.num_lost, len(sink.headers)) == (0, 3)


def test_what_the_receiver_will_never_take_is_lost_and_counted() -> None:
    with http_sink() as sink:
        sink.statuses = [400]
        with TraceExporter[int](target(sink.url, "http/protobuf"), WHO, span) as exporter:
            exporter.put(1)
        assert (exporter.num_lost, len(sink.headers)) == (1, 1)


@pytest.mark.parametrize("protocol", SINKS)
def test_where_nobody_listens_all_is_lost_in_bounded_time_and_nobody_waits(protocol: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        way = target(f"http://127.0.0.1:{taken.getsockname()[1]}", protocol)
        began_s = time.monotonic()
        with TraceExporter[int](way, WHO, span) as exporter:
            for number in range(12_000):
                exporter.put(number)
            assert time.monotonic() - began_s < 2
        assert time.monotonic() - began_s < 6
        assert exporter.num_lost == 12_000


@pytest.mark.parametrize("protocol", SINKS)
def test_metrics_arrive_at_the_interval_and_once_more_at_the_end(protocol: str) -> None:
    counter = Metric("penstock_things_total", "counter", "Things.", ("kind",))
    gauge = Metric("penstock_level", "gauge", "A level.")
    waits = Metric("penstock_wait_seconds", "histogram", "Waits.", (), (0.1, 1.0))
    tallies = Tallies((counter, gauge, waits))
    tallies.count(counter, "a").value = 3
    tallies.count(gauge).value = 0.5
    for value in (0.05, 0.5, 3.0):
        tallies.spread(waits).observe(value)
    with SINKS[protocol]() as sink:
        with MetricExporter(target_of_metrics(sink.url, protocol), WHO, lambda: [tallies], 0.05):
            while not sink.metrics:
                time.sleep(0.01)
            tallies.count(counter, "a").value = 4
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
