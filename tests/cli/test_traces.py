"""One trace from the client's span to the engine's decode, through real processes, as an OTLP receiver sees it."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.drills.stand import MODEL, stand

from tests.cli.real_gateway import RealGateway, real_gateway
from tests.observe.otlp.sink import SINKS, Received, Sink, points
from tests.waiting import eventually

pytestmark = pytest.mark.slow

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextlib.contextmanager
def fleet(protocol: str, directory: Path) -> Iterator[tuple[Sink, RealGateway]]:
    """A gateway and a replica of two ranks behind it, both of which push to one receiver."""
    with SINKS[protocol]() as sink, contextlib.ExitStack() as stack:
        telemetry = {"endpoint": sink.url, "protocol": protocol, "metrics_every_s": 0.5}
        config = directory / "replica.json"
        config.write_text(json.dumps({"telemetry": telemetry}))
        place = stack.enter_context(stand(directory, context=1024))
        replica = place.replica("--config", str(config), "--tp", "2")
        models = {MODEL: {"replicas": [replica.url], "price": {"input": 1.0, "output": 2.0}}}
        yield sink, stack.enter_context(real_gateway(directory, models=models, telemetry=telemetry))


def chat(gateway: RealGateway, headers: dict[str, str]) -> bytes:
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=60)
    messages = [{"role": "user", "content": "Count."}]
    body = {"model": MODEL, "stream": True, "max_tokens": 8, "ignore_eos": True, "messages": messages}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection.getresponse().read()


def one(spans: list[Received], name: str, service: str) -> Received:
    (found,) = [span for span in spans if span.name.startswith(name) and span.service == service]
    return found


@pytest.mark.parametrize("protocol", SINKS)
def test_a_trace_goes_from_the_clients_span_to_the_engines_decode(protocol: str, tmp_path: Path) -> None:
    with fleet(protocol, tmp_path) as (sink, gateway):
        answer = chat(gateway, {"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": "shop=1"})
        assert answer.endswith(b"data: [DONE]\n\n")
        spans = eventually(lambda: sink.spans, lambda spans: len(spans) >= 10)
        assert {span.trace_id for span in spans} == {TRACE}
        assert {span.state for span in spans} == {"shop=1"}
        door = one(spans, "chat", "penstock-gateway")
        assert door.parent_id == CLIENT
        below = {name: one(spans, name, "penstock-gateway") for name in ("admission", "pick", "POST")}
        assert {span.parent_id for span in below.values()} == {door.span_id}
        replica = one(spans, "chat", "penstock-replica")
        assert replica.parent_id == below["POST"].span_id
        assert replica.attributes["penstock.parallelism"] == "TP2"
        names = ("tokenize", "engine queue", "prefill", "first token", "decode")
        parts = [one(spans, name, "penstock-replica") for name in names]
        assert {part.parent_id for part in parts} == {replica.span_id}
        assert [part.start_ns for part in parts[1:]] == [part.end_ns for part in parts[:-1]]
        assert all(door.start_ns <= span.start_ns <= span.end_ns for span in spans if span.service == door.service)
        _check_what_is_said(door, below["pick"], parts)
        _check_metrics(sink)
        _check_the_log(gateway, door)


def _check_what_is_said(door: Received, pick: Received, parts: list[Received]) -> None:
    said = door.attributes
    assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("chat", MODEL)
    assert said["gen_ai.usage.output_tokens"] == 8 == parts[-1].attributes["penstock.tokens"]
    assert said["penstock.cost"] > 0
    assert len(pick.attributes["penstock.pick.candidates"]) == len(pick.attributes["penstock.pick.totals"]) == 1
    assert any(name.startswith("penstock.pick.scores.") for name in pick.attributes)
    assert parts[2].attributes["penstock.tokens"] > 0


def _check_metrics(sink: Sink) -> None:
    def count(name: str) -> int:
        return sum(point.count for _, point in points(sink.metrics[name])) if name in sink.metrics else 0

    for service in ("penstock-gateway", "penstock-replica"):
        for name in ("gen_ai.server.time_to_first_token", "gen_ai.server.request.duration"):
            eventually(lambda: count(f"{service} {name}"), lambda found: found == 1)  # noqa: B023
    tokens = points(sink.metrics["penstock-replica gen_ai.client.token.usage"])
    assert {said["gen_ai.token.type"]: point.sum for said, point in tokens}["output"] == 8
    assert all(said["gen_ai.request.model"] == MODEL for said, _ in tokens)


def _check_the_log(gateway: RealGateway, door: Received) -> None:
    (line,) = eventually(lambda: [line for line in gateway.log.read_text().splitlines() if f"trace={TRACE}" in line])
    assert f"id={door.attributes['penstock.request.id']}" in line
