"""The OTLP exporters of a process, put together: its traces' and its metrics', if there is where to push."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from penstock.engine.client import EngineClient
from penstock.gateway.records import tracing as at_gateway
from penstock.observe import catalog
from penstock.observe.otlp.exporter import MetricExporter, TraceExporter
from penstock.observe.otlp.target import Target, Telemetry
from penstock.observe.redaction import redact
from penstock.observe.registry import Registry
from penstock.observe.spans import Attributes, Roots
from penstock.server import tracing as at_replica
from penstock.server.recorder import Recorder

_LOOK_S = 5.0

log = logging.getLogger("penstock.telemetry")


def _say(what: str, target: Target, how: str) -> None:
    log.info("%s go to %s over %s, %s", what, redact(target.url), target.protocol, how)


@contextmanager
def gateway_traces(found: Telemetry) -> Iterator[at_gateway.Traces]:
    if found.traces is None:
        yield at_gateway.Traces()
        return
    roots, ids = Roots(found.sampling), Roots(found.sampling)  # each has its thread
    with TraceExporter[at_gateway.Traced](
        found.traces, found.resource, lambda one: at_gateway.spans(one, ids.span_id)
    ) as out:
        _say("traces", found.traces, f"{found.sampling.ratio:.3g} of those that do not say")
        yield at_gateway.Traces(roots, out)


@contextmanager
def replica_traces(found: Telemetry, recorder: Recorder, engine: EngineClient) -> Iterator[None]:
    if found.traces is None:
        yield
        return
    roots, ids = Roots(found.sampling), Roots(found.sampling)
    with TraceExporter[at_replica.Traced](
        found.traces, found.resource, lambda one: at_replica.spans(one, ids.span_id)
    ) as out:
        _say("traces", found.traces, f"{found.sampling.ratio:.3g} of those that do not say")
        lost = recorder.registry.count(catalog.TRACES_LOST)
        traces = at_replica.Traces(roots, out, lost, lambda: _rank_attributes(engine))
        recorder.listeners.append(traces.ended)
        yield


def _rank_attributes(engine: EngineClient) -> Attributes:
    return at_replica.rank_attributes(engine.info.layout if engine.info is not None else "", engine.rank_figures)


@asynccontextmanager
async def pushed_metrics(found: Telemetry, look: Callable[[], Sequence[Registry]]) -> AsyncIterator[None]:
    """`look` is called in this event loop."""
    if found.metrics is None:
        yield
        return
    loop = asyncio.get_running_loop()

    async def look_here() -> Sequence[Registry]:
        return look()

    def ask() -> Sequence[Registry]:
        return asyncio.run_coroutine_threadsafe(look_here(), loop).result(_LOOK_S)

    exporter = MetricExporter(found.metrics, found.resource, ask, found.metrics_every_s).start()
    _say("metrics", found.metrics, f"every {found.metrics_every_s:g} s")
    try:
        yield
    finally:
        await asyncio.to_thread(exporter.close)
