"""A small OTLP receiver, over HTTP and gRPC, on the official protobufs: it keeps what it is sent, and does as told."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_service
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from tests.waiting import eventually

_MESSAGES = {
    "/v1/traces": trace_service.ExportTraceServiceRequest,
    "/v1/metrics": metrics_service.ExportMetricsServiceRequest,
}


@dataclass
class Received:
    """A span, in plain values."""

    name: str
    service: str
    resource: dict[str, Any]
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str
    state: str
    is_sampled: bool
    links: list[str]


@dataclass
class Sink:
    url: str = ""
    statuses: list[int] = field(default_factory=list)  # of the next answers over HTTP; then 200
    headers: list[dict[str, str]] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)

    @property
    def spans(self) -> list[Received]:
        return [
            _received(span, _values(of.resource.attributes))
            for request in list(self.requests)
            if isinstance(request, trace_service.ExportTraceServiceRequest)
            for of in request.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]

    @property
    def metrics(self) -> dict[str, Any]:
        """The last messages, by service and name."""
        return {
            f"{_values(of.resource.attributes)['service.name']} {metric.name}": metric
            for request in list(self.requests)
            if isinstance(request, metrics_service.ExportMetricsServiceRequest)
            for of in request.resource_metrics
            for scope in of.scope_metrics
            for metric in scope.metrics
        }

    def wait_for(self, number: int) -> list[Received]:
        """Returns the spans once there are at least so many."""
        return eventually(lambda: self.spans, lambda spans: len(spans) >= number)


def points(metric: Any) -> list[tuple[dict[str, Any], Any]]:
    kind = metric.WhichOneof("data")
    return [(_values(point.attributes), point) for point in getattr(metric, kind).data_points]


@contextlib.contextmanager
def http_sink() -> Iterator[Sink]:
    sink = Sink()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _receiving(sink))
    server.daemon_threads = True
    sink.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield sink
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def grpc_sink() -> Iterator[Sink]:
    sink = Sink()

    class Service(trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            sink.headers.append(dict(context.invocation_metadata()))
            sink.requests.append(request)
            if isinstance(request, trace_service.ExportTraceServiceRequest):
                return trace_service.ExportTraceServiceResponse()
            return metrics_service.ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_grpc.add_TraceServiceServicer_to_server(Service(), server)
    metrics_grpc.add_MetricsServiceServicer_to_server(Service(), server)
    sink.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield sink
    finally:
        server.stop(0).wait()


SINKS = {"http/protobuf": http_sink, "grpc": grpc_sink}


def _receiving(sink: Sink) -> type[BaseHTTPRequestHandler]:
    class Receiver(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-type"] == "application/x-protobuf"
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            status = sink.statuses.pop(0) if sink.statuses else 200
            sink.headers.append({name.lower(): value for name, value in self.headers.items()})
            if status == 200:
                sink.requests.append(_MESSAGES[self.path].FromString(body))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

    return Receiver


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        span.name,
        resource["service.name"],
        resource,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        span.status.message if span.status.code == 2 else "",
        span.trace_state,
        bool(span.flags & 1),
        [link.trace_id.hex() for link in span.links],
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
