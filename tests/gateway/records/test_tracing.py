"""A request's trace through a gateway: what replicas and providers are sent of it, and the spans that come of it."""

from __future__ import annotations

from itertools import count
from typing import Any

import openai
import pytest

from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.tracing import Traced, Traces, _of_pick, spans
from penstock.gateway.settings.gateway import ModelSettings
from penstock.observe.backlog import Backlog
from penstock.observe.spans import Kind, Roots, Sampling, Span
from penstock.observe.trace_context import TraceContext, parse
from penstock.router.legs import Alone, Source, SourceReason
from penstock.router.router import Choice
from penstock.tenancy.prices import Price
from tests.gateway.pairs import PairedVllm, in_front_of
from tests.gateway.provider import Provider, providing
from tests.gateway.running import RunningGateway, running_gateway
from tests.snapshots import snapshot
from tests.waiting import eventually

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SENT = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": "shop=1"}


class Kept(Backlog[Traced]):
    def __init__(self) -> None:
        super().__init__("kept", most=100, batch=100)
        self.all: list[Traced] = []

    def put(self, one: Traced) -> None:
        self.all.append(one)

    def write(self, batch: list[Traced]) -> None:
        raise AssertionError

    def spans(self) -> list[Span]:
        ids = count(1)
        return [span for one in self.all for span in spans(one, lambda: f"{next(ids):016x}")]


def tracing(ratio: float = 1.0) -> tuple[Kept, GatewayRecorder]:
    kept = Kept()
    return kept, GatewayRecorder(traces=Traces(Roots(Sampling(ratio)), kept))


def models(*providers: Provider) -> dict[str, ModelSettings]:
    urls = [provider.url for provider in providers]
    return {"m": ModelSettings(replicas=urls, dialect="openai", aliases=["best"], price=Price(input=1.0, output=2.0))}


def ask(gateway: RunningGateway, model: str = "m", **headers: str) -> None:
    body: Any = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    gateway.openai.chat.completions.create(**body, extra_headers=headers)


def context(provider: Provider, number: int = -1) -> TraceContext | None:
    headers = provider.headers[number]
    return parse(headers.get("traceparent", "").encode(), headers.get("tracestate", "").encode())


def test_a_clients_trace_goes_on_to_the_provider_below_a_span_of_the_gateway() -> None:
    kept, recorder = tracing()
    with providing() as provider, running_gateway(pools=models(provider), recorder=recorder) as gateway:
        ask(gateway, "best", **SENT)
        eventually(lambda: bool(kept.all))
        root, admission, pick, visit = kept.spans()
        sent = context(provider)
        assert sent is not None
        assert (sent.trace_id, sent.span_id, sent.is_sampled, sent.state) == (TRACE, visit.span_id, True, b"shop=1")
        assert (root.trace_id, root.parent_id, root.kind) == (TRACE, CLIENT, Kind.SERVER)
        assert {one.parent_id for one in (admission, pick, visit)} == {root.span_id}
        assert len({one.span_id for one in (root, admission, pick, visit)}) == 4
        assert root.start_ns == admission.start_ns <= admission.end_ns <= visit.start_ns <= visit.end_ns <= root.end_ns
        said = root.attributes
        assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("chat", "m")
        assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 1)
        assert said["penstock.cost"] == pytest.approx(5e-6)
        assert visit.attributes["server.port"] == provider.port
        assert pick.attributes["penstock.pick.replica"] == provider.url
        assert pick.attributes["penstock.pick.candidates"] == [provider.url]


def test_who_has_no_trace_gets_one_and_the_provider_is_told() -> None:
    kept, recorder = tracing()
    with providing() as provider, running_gateway(pools=models(provider), recorder=recorder) as gateway:
        ask(gateway)
        eventually(lambda: bool(kept.all))
        sent, root = context(provider), kept.spans()[0]
        assert sent is not None
        assert (sent.trace_id, root.parent_id) == (root.trace_id, "")


def test_a_gateway_that_exports_nothing_passes_a_trace_on_as_it_came() -> None:
    with providing() as provider, running_gateway(pools=models(provider)) as gateway:
        ask(gateway, **SENT)
        assert {name: provider.headers[0][name] for name in SENT} == SENT
        ask(gateway)
        assert "traceparent" not in provider.headers[1]
        ask(gateway, traceparent="rubbish")
        assert "traceparent" not in provider.headers[2]


def test_each_try_has_a_span_and_the_one_that_failed_says_so() -> None:
    kept, recorder = tracing()
    with providing(status=503) as broken, providing() as well:
        with running_gateway(pools=models(broken, well), recorder=recorder) as gateway:

            def asked_again() -> list[Any]:
                """The requests that came to the broken one first; where each goes is drawn."""
                ask(gateway)
                return [one for one in kept.all if one.facts.num_tries == 2]

            retried = eventually(asked_again)[0]
        first, second = [one for one in spans(retried, lambda: "1" * 16) if one.kind is Kind.CLIENT]
        assert (first.attributes["penstock.try"], second.attributes["penstock.try"]) == (1, 2)
        assert (bool(first.error), bool(second.error)) == (True, False)
        assert first.end_ns <= second.start_ns
        assert len(retried.trace.picks) == 2


def test_each_leg_of_a_request_that_two_servers_share_has_a_span() -> None:
    kept, recorder = tracing()
    with PairedVllm() as p, PairedVllm() as d, in_front_of((p, "prefill"), (d, "decode"), recorder=recorder) as gateway:
        ask(gateway, **SENT)
        ask(gateway, **SENT)
        p.kill()
        ask(gateway, **SENT)
        eventually(lambda: len(kept.all), lambda count: count == 3)
        legs = [span for span in kept.spans() if span.kind is Kind.CLIENT]
        told = [headers["traceparent"] for server in (p, d) for _, _, headers in server.asked]
    assert [span.attributes.get("penstock.leg") for span in legs] == ["prefill", None] * 2 + ["prefill", None]
    assert [span.attributes.get("penstock.outcome") for span in legs[::2]] == [
        "handed_over",
        "handed_over",
        "unreachable",
    ]
    assert [bool(span.error) for span in legs] == [False] * 4 + [True, False]
    assert all(first.end_ns <= second.end_ns for first, second in zip(legs[::2], legs[1::2], strict=True))
    assert {span.parent_id for span in legs} == {one.trace.root.span_id for one in kept.all}
    assert sorted(told) == sorted(f"00-{TRACE}-{span.span_id}-01" for span in legs if not span.error)


def test_what_is_not_sampled_is_not_kept_unless_it_failed() -> None:
    kept, recorder = tracing(0.0)
    with providing() as provider, running_gateway(pools=models(provider), recorder=recorder) as gateway:
        ask(gateway)
        sent = context(provider)
        assert sent is not None
        assert not sent.is_sampled
        ask(gateway, **SENT)
        eventually(lambda: len(kept.all) == 1)
        with pytest.raises(openai.NotFoundError):
            ask(gateway, "no-such-model")
        provider.status = 500
        with pytest.raises(openai.InternalServerError):
            ask(gateway)
        eventually(lambda: len(kept.all) == 2)
        assert [one.facts.ending.value for one in kept.all] == ["ok", "failed"]
        failed = kept.spans()[4]
        assert (failed.error, failed.is_sampled) == (failed.attributes["error.type"], False)


def test_who_is_turned_away_at_the_door_has_a_span_of_no_length() -> None:
    kept, recorder = tracing()
    with providing() as provider, running_gateway(pools=models(provider), recorder=recorder) as gateway:
        with pytest.raises(openai.NotFoundError):
            ask(gateway, "no-such-model", **SENT)
        eventually(lambda: bool(kept.all))
        (root,) = kept.spans()
        assert (root.trace_id, root.parent_id, root.error) == (TRACE, CLIENT, "")
        assert root.attributes["penstock.reason"] == "model_not_found"
        assert root.start_ns == root.end_ns


def test_a_pick_has_its_second_leg_or_why_there_is_none() -> None:
    picked, other = snapshot(id="http://d:1", models=("m",)), snapshot(id="http://p:1", models=("m",))
    source = Source(other, SourceReason.PREFILL, 800, 900, 1, 0.5, 0.25)
    found = _of_pick(Choice(picked, [picked], {}, [1.0], source=source))
    legs = {name: value for name, value in found.items() if "source" in name or "pulled" in name}
    assert legs == {
        "penstock.pick.source": "http://p:1",
        "penstock.pick.source_reason": "prefill",
        "penstock.pick.pulled_tokens": 800,
        "penstock.pick.source_gain_s": 0.25,
    }
    assert _of_pick(Choice(picked, [picked], {}, [1.0], alone=Alone.WARM))["penstock.pick.alone"] == "warm_prefix"
