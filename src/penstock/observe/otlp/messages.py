"""Spans and tallies as OTLP's messages, made of the official protobufs. It sends nothing.

This module needs the extra `penstock[otel]`; nobody imports it who does not push.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.metrics.v1 import metrics_pb2 as metrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as traces

from penstock import __version__
from penstock.observe.catalog import Metric
from penstock.observe.otlp.names import Named, named
from penstock.observe.registry import Histogram, Labels, Registry
from penstock.observe.spans import Attributes, Kind, Span, Value

_CUMULATIVE = metrics.AGGREGATION_TEMPORALITY_CUMULATIVE
_SAMPLED, _IS_NOT_REMOTE, _IS_REMOTE = 1, 0x100, 0x300  # a span's flags; the others: is its parent in another process


def resource(attributes: Mapping[str, str]) -> Resource:
    found = Resource()
    _say(found.attributes, attributes)
    return found


def trace_request(who: Resource, spans: Iterable[Span]) -> bytes:
    request = ExportTraceServiceRequest()
    scope = _scope(request.resource_spans.add(resource=who).scope_spans)
    for span in spans:
        _fill(scope.spans.add(), span)
    return bytes(request.SerializeToString())


def refused(answer: bytes) -> str:
    """Returns what a receiver says of spans that it did not take; empty: it took all."""
    said = ExportTraceServiceResponse.FromString(answer).partial_success
    return f"{said.rejected_spans} spans: {said.error_message}" if said.rejected_spans else ""


def metrics_request(who: Resource, registry: Iterable[Registry], began_ns: int, now_ns: int) -> bytes:
    request = ExportMetricsServiceRequest()
    scope = _scope(request.resource_metrics.add(resource=who).scope_metrics)
    found: dict[str, metrics.Metric] = {}  # by name: several of ours may be one of theirs
    for one in registry:
        for metric, series in one.series():
            name = named(metric)
            for labels, value in series:
                if name.name not in found:
                    found[name.name] = scope.metrics.add(name=name.name, unit=name.unit, description=metric.help)
                _add(found[name.name], metric, name, labels, value, began_ns, now_ns)
    return bytes(request.SerializeToString())


def _scope(scopes: Any) -> Any:
    return scopes.add(scope=InstrumentationScope(name="penstock", version=__version__))


# -- spans; messages are filled where they are: made apart and copied in, they would cost three times as much


def _fill(found: traces.Span, span: Span) -> None:
    is_remote = span.kind is Kind.SERVER and span.parent_id
    found.trace_id, found.span_id = bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id)
    found.parent_span_id = bytes.fromhex(span.parent_id)
    found.name, found.kind = span.name, traces.Span.SpanKind.ValueType(span.kind)
    found.start_time_unix_nano, found.end_time_unix_nano = span.start_ns, max(span.start_ns, span.end_ns)
    found.trace_state = span.state.decode("latin-1")
    found.flags = _SAMPLED * span.is_sampled | (_IS_REMOTE if is_remote else _IS_NOT_REMOTE)
    _say(found.attributes, span.attributes)
    if span.error:
        found.status.code, found.status.message = traces.Status.STATUS_CODE_ERROR, span.error
    if span.link is not None:
        link = found.links.add()
        link.trace_id, link.span_id = bytes.fromhex(span.link.trace_id), bytes.fromhex(span.link.span_id)


def _say(to: Any, attributes: Attributes) -> None:
    for key, value in attributes.items():
        _put(to.add(key=key).value, value)


def _put(to: AnyValue, value: Value) -> None:
    if isinstance(value, str):
        to.string_value = value
    elif isinstance(value, bool):
        to.bool_value = value
    elif isinstance(value, int):
        to.int_value = value
    elif isinstance(value, float):
        to.double_value = value
    else:
        for one in value:
            _put(to.array_value.values.add(), one)


# -- metrics


def _add(
    message: metrics.Metric,
    metric: Metric,
    name: Named,
    labels: Labels,
    value: float | Histogram,
    began_ns: int,
    now_ns: int,
) -> None:
    if isinstance(value, Histogram):
        counts = list(value.counts)
        message.histogram.aggregation_temporality = _CUMULATIVE
        point = message.histogram.data_points.add(
            count=sum(counts), sum=value.total, bucket_counts=counts, explicit_bounds=metric.buckets
        )
    elif metric.kind == "counter":
        message.sum.aggregation_temporality, message.sum.is_monotonic = _CUMULATIVE, True
        point = message.sum.data_points.add(as_double=value)
    else:
        point = message.gauge.data_points.add(as_double=value)
    point.start_time_unix_nano, point.time_unix_nano = began_ns, now_ns
    _say(point.attributes, dict(zip(map(name.attribute, metric.labels), labels, strict=True)) | dict(name.fixed))
