"""Transport of messages to an OTLP receiver: over HTTP or over gRPC. One thread, one connection, one message at a time.

A message that the receiver may take another time is a `Busy`, with how long it wants to be left alone; all else that
goes wrong is an OSError. This module knows neither spans nor metrics.
"""

from __future__ import annotations

import gzip
import http.client
import os
import ssl
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from penstock import __version__
from penstock.core.errors import ConfigError
from penstock.observe.otlp.target import Signal, Target

_SERVICES = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}
_BUSY = (429, 502, 503, 504)
_MAX_ANSWER = 1 << 20  # bytes
_AGENT = f"penstock/{__version__}"


class Busy(OSError):
    def __init__(self, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s


class Transport(Protocol):
    def send(self, message: bytes, timeout_s: float) -> bytes:
        """The answer."""

    def close(self) -> None: ...


def transport(signal: Signal, target: Target) -> Transport:
    """Raises ConfigError where something is not installed."""
    return OverGrpc(target, _SERVICES[signal]) if target.protocol == "grpc" else OverHttp(target)


class OverHttp:
    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        assert parts.hostname is not None
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._is_gzipped = target.is_gzipped
        self._headers = {"content-type": "application/x-protobuf", "user-agent": _AGENT} | target.headers
        if target.is_gzipped:
            self._headers["content-encoding"] = "gzip"
        if parts.scheme == "https":
            trusted = ssl.create_default_context(cafile=target.certificate)
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, context=trusted
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port)

    def send(self, message: bytes, timeout_s: float) -> bytes:
        if self._is_gzipped:
            message = gzip.compress(message, 1)
        connection = self._connection
        was_open = connection.sock is not None
        try:
            return self._ask(message, timeout_s)
        except (http.client.HTTPException, ConnectionError) as error:
            connection.close()
            if not was_open:
                raise Busy(f"{error or type(error).__name__}") from None
        except OSError:
            connection.close()
            raise
        return self.send(message, timeout_s)  # the receiver had ended a connection that nobody used

    def close(self) -> None:
        self._connection.close()

    def _ask(self, message: bytes, timeout_s: float) -> bytes:
        connection = self._connection
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        connection.request("POST", self._path, message, self._headers)
        answer = connection.getresponse()
        body = answer.read(_MAX_ANSWER)
        if answer.status in _BUSY:
            raise Busy(f"status {answer.status}", _seconds(answer.headers.get("retry-after")))
        if answer.status >= 300:
            raise OSError(f"status {answer.status}")
        return body


class OverGrpc:
    def __init__(self, target: Target, method: str) -> None:
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # who forks here execs at once: it need not complain
        try:
            import grpc
        except ImportError:
            raise ConfigError("OTLP over grpc needs grpcio: pip install 'penstock[otel]'") from None
        parts = urlsplit(target.url)
        address = f"{parts.netloc.rpartition('@')[2]}" if parts.port else f"{parts.netloc}:4317"
        compression = grpc.Compression.Gzip if target.is_gzipped else grpc.Compression.NoCompression
        if parts.scheme == "https":
            trusted = _read(target.certificate) if target.certificate is not None else None
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted), compression=compression)
        else:
            self._channel = grpc.insecure_channel(address, compression=compression)
        self._call: Callable[..., bytes] = self._channel.unary_unary(method)
        self._metadata = [(name.lower(), value) for name, value in target.headers.items()]
        self._failed = grpc.RpcError
        code = grpc.StatusCode
        self._busy = (
            code.CANCELLED,
            code.DEADLINE_EXCEEDED,
            code.ABORTED,
            code.OUT_OF_RANGE,
            code.UNAVAILABLE,
            code.DATA_LOSS,
            code.RESOURCE_EXHAUSTED,
        )

    def send(self, message: bytes, timeout_s: float) -> bytes:
        try:
            return self._call(message, timeout=timeout_s, metadata=self._metadata)
        except self._failed as error:
            raise self._translated(error) from None

    def close(self) -> None:
        self._channel.close()

    def _translated(self, error: Any) -> OSError:
        what = f"{error.code().name}: {error.details()}"
        return Busy(what) if error.code() in self._busy else OSError(what)


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isdecimal() else None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_CERTIFICATE: cannot read {path}: {error.strerror}") from None
