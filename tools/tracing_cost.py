"""The cost of traces to a gateway, in microseconds a request: `python -m tools.tracing_cost`. Needs penstock[otel].

On the event loop: the trace is begun, four facts taken down, the header for the replica made, and at the end it is
decided whether it is kept. In the exporter's thread, which shares the interpreter with the loop: spans and their OTLP.
"""

from __future__ import annotations

import time
from timeit import repeat

from penstock.core.replica import ReplicaSnapshot
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.gateway.records.trace import Trace
from penstock.gateway.records.tracing import Traced, Traces, spans
from penstock.observe.backlog import Backlog
from penstock.observe.otlp import messages
from penstock.observe.spans import Roots, Sampling
from penstock.router.router import Choice

REQUESTS, BATCH = 20_000, 50
REPLICAS = [ReplicaSnapshot(id=f"http://10.0.0.{n}:9000", url="", models=("m",)) for n in range(4)]
SCORES = [0.1, 0.2, 0.3, 0.4]
CHOICE = Choice(REPLICAS[0], REPLICAS, {"prefix": SCORES, "load": SCORES}, SCORES, strategy="default")
HEADERS = {b"host": b"localhost", b"content-type": b"application/json"}
TRACED = HEADERS | {b"traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class Nowhere(Backlog[Traced]):
    def put(self, one: Traced) -> None:
        pass

    def write(self, batch: list[Traced]) -> None:
        pass


def request(traces: Traces, headers: dict[bytes, bytes]) -> RequestFacts:
    trace = traces.begin(headers, 1.0)
    if trace is not None:
        trace.chose(CHOICE, 1.0)
        trace.sent(REPLICAS[0].id, 1.0)
        trace.left(2.0, has_failed=False)
    facts = RequestFacts(
        "0f" * 12,
        "chat/completions",
        Ending.OK,
        "",
        "acme",
        "key",
        "m",
        REPLICAS[0].id,
        700,
        300,
        200,
        0.001,
        0.1,
        1.0,
        1,
        "",
        b"queue;dur=1.2, prefill;dur=33.9",
        "m",
        0.001,
        trace,
    )
    if trace is not None:
        traces.ended(facts)
    return facts


def best_us(traces: Traces, headers: dict[bytes, bytes]) -> float:
    return 1e6 * min(repeat(lambda: request(traces, headers), number=REQUESTS, repeat=5)) / REQUESTS


def main() -> None:
    out = Nowhere("nowhere", most=1, batch=1)
    bare = best_us(Traces(), HEADERS)
    for name, traces, headers in (
        ("off, a client's context is passed on", Traces(), TRACED),
        ("on, not sampled", Traces(Roots(Sampling(0.0)), out), HEADERS),
        ("on, sampled", Traces(Roots(Sampling(1.0)), out), HEADERS),
        ("on, a client's context is gone on with", Traces(Roots(Sampling(1.0)), out), TRACED),
    ):
        print(f"{best_us(traces, headers) - bare:6.1f} us on the loop    {name}")
    roots, who = Roots(Sampling()), messages.resource({"service.name": "penstock-gateway"})
    traces = [request(Traces(roots, out), HEADERS) for _ in range(BATCH)]
    ended = [Traced(time.time_ns(), one, one.trace) for one in traces if isinstance(one.trace, Trace)]

    def encode() -> bytes:
        return messages.trace_request(who, (span for one in ended for span in spans(one, roots.span_id)))

    seconds = min(repeat(encode, number=20, repeat=5)) / 20 / BATCH
    print(f"{1e6 * seconds:6.1f} us in the thread  for each that is kept, {len(encode()) // BATCH} bytes")


if __name__ == "__main__":
    main()
