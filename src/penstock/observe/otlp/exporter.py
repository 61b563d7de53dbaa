"""Exporters of spans as requests end, and of metrics at an interval. Each has its own thread, and nobody waits for it.

A queue is bounded, and so is how long a message is tried again; beyond that it is lost, and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.core.errors import ConfigError
from penstock.observe.backlog import Backlog
from penstock.observe.otlp.target import Target
from penstock.observe.otlp.transport import Busy, Transport, transport
from penstock.observe.recurring import Recurring
from penstock.observe.registry import Registry
from penstock.observe.spans import Span

log = logging.getLogger("penstock.telemetry")
T = TypeVar("T")

_MAX_WAITING = 10_000  # requests
_BATCH = 50  # requests: some 250 spans, and a few milliseconds' work


@dataclass(frozen=True)
class RetryTimes:
    first_pause_s: float = 0.5  # after a receiver was busy; then twice as long each time
    longest_pause_s: float = 5.0
    goodbye_s: float = 2.0  # for all that is left when the process ends


class Sender:
    """Sends a message until it has arrived or its time is over."""

    def __init__(
        self,
        way: Transport,
        timeout_s: float,
        stopping: threading.Event,
        times: RetryTimes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._way = way
        self._timeout_s = timeout_s
        self._stopping = stopping
        self._times = times
        self._clock = clock
        self._ends_at: float | None = None  # once the process does

    def send(self, message: bytes) -> bytes:
        deadline, pause_s = self._deadline(), self._times.first_pause_s
        while True:
            left_s = deadline - self._clock()
            if left_s <= 0:
                raise TimeoutError("there is no time left for it")
            try:
                return self._way.send(message, left_s)
            except Busy as busy:
                wait_s = busy.retry_after_s or pause_s
                if self._clock() + wait_s >= deadline or self._stopping.wait(wait_s):
                    raise
                pause_s = min(2 * pause_s, self._times.longest_pause_s)

    def _deadline(self) -> float:
        now = self._clock()
        if not self._stopping.is_set():
            return now + self._timeout_s
        if self._ends_at is None:
            self._ends_at = now + min(self._times.goodbye_s, self._timeout_s)
        return self._ends_at


class TraceExporter(Backlog[T], Generic[T]):
    """Takes what is known of a request, and makes spans of it in its thread."""

    def __init__(
        self,
        target: Target,
        who: Mapping[str, str],
        spans: Callable[[T], Iterable[Span]],
        *,
        times: RetryTimes = RetryTimes(),
    ) -> None:
        _check_installed()
        from penstock.observe.otlp import messages

        super().__init__("trace export", most=_MAX_WAITING, batch=_BATCH)
        self._way = transport("traces", target)
        self._sender = Sender(self._way, target.timeout_s, self._stopping, times)
        self._spans = spans
        resource, self._refused = messages.resource(who), messages.refused
        self._encode: Callable[[Iterable[Span]], bytes] = lambda spans: messages.trace_request(resource, spans)

    def write(self, batch: list[T]) -> None:
        answer = self._sender.send(self._encode(span for one in batch for span in self._spans(one)))
        if refused := self._refused(answer):
            log.warning("the OTLP receiver took spans only in part: %s", refused)

    def close(self) -> None:
        super().close()
        self._way.close()


class MetricExporter(Recurring):
    """`look` is called at an interval, in this thread, for the tallies as they stand."""

    def __init__(
        self,
        target: Target,
        who: Mapping[str, str],
        look: Callable[[], Sequence[Registry]],
        every_s: float,
        *,
        times: RetryTimes = RetryTimes(),
    ) -> None:
        _check_installed()
        from penstock.observe.otlp import messages

        super().__init__("metric export", every_s)
        self._way = transport("metrics", target)
        self._sender = Sender(self._way, target.timeout_s, self._stopping, times)
        self._look = look
        resource, began_ns = messages.resource(who), time.time_ns()
        self._encode: Callable[[Iterable[Registry]], bytes] = lambda registry: messages.metrics_request(
            resource, registry, began_ns, time.time_ns()
        )
        self.num_failed = 0

    def close(self) -> None:
        super().close()
        self._way.close()

    def tick(self) -> None:
        try:
            self._sender.send(self._encode(self._look()))
        except OSError as error:
            if not self.num_failed:
                log.error("metrics cannot be pushed: %s", error)
            self.num_failed += 1


def is_installed() -> bool:
    try:
        import opentelemetry.proto.collector.trace.v1.trace_service_pb2  # noqa: F401
    except ImportError:
        return False
    return True


def _check_installed() -> None:
    if not is_installed():
        raise ConfigError(
            "traces and metrics over OTLP need more: pip install 'penstock[otel]', or set no telemetry.endpoint"
        )
