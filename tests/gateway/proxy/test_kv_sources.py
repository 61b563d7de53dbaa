"""Prompts that one replica computes and another answers, as the gateway tells them: replicas are real but for the
model and the transfer itself. What a replica is told to pull it computes here, as it does when a pull fails."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.api.asgi import Receive, Scope, Send
from penstock.api.relay import KV_SOURCE_HEADER
from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.settings import ServerSettings
from penstock.router.strategies import RoutingSettings
from tests.clocks import ManualClock
from tests.engine.expecting import expected
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

LONG = "the water falls from the mountain into the valley " * 24
KV_PORTS = iter(range(7001, 8000))


class Told:
    """The sources that a replica was named, one for each request to generate."""

    def __init__(self) -> None:
        self.sources: list[str | None] = []

    def mount(self, app: Any, recorder: Any) -> Any:
        async def listening(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/v1/completions":
                found = dict(scope["headers"]).get(KV_SOURCE_HEADER.encode())
                self.sources.append(found.decode() if found is not None else None)
            await app(scope, receive, send)

        return listening


@contextlib.contextmanager
def replica_of(role: Any = "both", layout: str = "l", **options: Any) -> Iterator[tuple[Replica, Told, str]]:
    """A replica that says that it has a KV transfer, what it was told, and where that transfer would be."""
    told, port = Told(), next(KV_PORTS)
    options = {"routing_tokens": ROUTING_TOKENS, "step_s": 0.02, **options}
    with serving(ServerSettings(role=role), mount=told.mount, **options) as replica:
        assert replica.engine.info is not None
        replica.engine.info = replace(replica.engine.info, kv_port=port, kv_layout=layout)
        yield replica, told, f"127.0.0.1:{port}"


def ask(gateway: RunningGateway, prompt: str = LONG, tokens: int = 2) -> str:
    found = gateway.openai.completions.with_raw_response.create(
        model=NAME, prompt=prompt, max_tokens=tokens, temperature=0
    )
    return str(found.headers["x-penstock-route"])


def split(gateway: RunningGateway, mode: Any) -> None:
    router = gateway.app.admission.router
    gateway.call(lambda: router.configure(RoutingSettings(), {}, {NAME: mode}))


@pytest.mark.slow
def test_a_prompt_is_computed_by_a_prefill_replica_and_answered_by_another() -> None:
    with (
        replica_of("prefill") as (p, asked_of_p, kv_address),
        replica_of("decode") as (d, told, _),
        running_gateway(p, d, clock=ManualClock()) as gateway,
    ):
        split(gateway, "always")
        name = gateway.app.replicas[f"http://{p.host}:{p.port}"].name
        route = ask(gateway)
        assert told.sources == [f"{kv_address};prefill"]
        assert asked_of_p.sources == []  # the gateway has one stream, and that is with the other
        assert f';source="{name}";why=prefill;' in route
        assert 'dropped="prefill_only:1"' in route
        assert f'penstock_gateway_kv_sources_total{{model="{NAME}",reason="prefill"}} 1' in gateway.metrics()

        split(gateway, "never")
        assert ";alone=never;" in ask(gateway, "another " * 100)
        assert told.sources[1:] == [None]

        split(gateway, "auto")
        assert ";alone=short_prompt;" in ask(gateway, "short")

        gateway.set_in_use(d, False)  # nobody else is left: it answers rather than nobody
        assert "dropped" in ask(gateway, "short")
        assert asked_of_p.sources == [None]
        assert f'penstock_gateway_prefill_answers_total{{model="{NAME}"}} 1' in gateway.metrics()


@pytest.mark.slow
def test_a_prefix_is_pulled_from_a_replica_that_drains_if_both_lay_their_blocks_out_alike() -> None:
    with (
        replica_of() as (one, _, kv_address),
        replica_of() as (two, told, _),
        replica_of(layout="other") as (three, other_told, _),
        running_gateway(one, two, three, clock=ManualClock()) as gateway,
    ):
        for away in (two, three):
            gateway.set_in_use(away, False)
        ask(gateway)
        index = gateway.app.admission.router.index
        at_one = f"http://{one.host}:{one.port}"
        eventually(lambda: gateway.call(lambda: index.num_blocks(at_one)))
        one.call("POST", "/v1/penstock/drain")
        eventually(gateway.states, lambda states: states[0] == "draining")
        gateway.set_in_use(two, True)
        assert ";why=prefix;" in ask(gateway)
        assert told.sources == [kv_address]
        gateway.set_in_use(two, False)
        gateway.set_in_use(three, True)
        assert ";alone=no_source;" in ask(gateway)
        assert other_told.sources == [None]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "takes_along"), [("l", True), ("other", False)])
def test_a_stream_of_a_replica_that_drains_goes_on_with_its_kv(layout: str, takes_along: bool) -> None:
    with (
        replica_of(step_s=0.1) as (slow, slow_told, kv_address),
        replica_of(step_s=0.0, layout=layout) as (fast, told, _),
        running_gateway(slow, fast, clock=ManualClock()) as gateway,
    ):
        gateway.set_in_use(fast, False)
        stream = gateway.openai.completions.create(
            model=NAME, prompt="go on", max_tokens=100, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        text = next(iter(stream)).choices[0].text
        gateway.set_in_use(fast, True)
        slow.call("POST", "/v1/penstock/drain")
        text += "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        prompt, vocab_size = slow.prompt_ids("go on"), slow.model.tokenizer.vocab_size
        assert text == slow.model.tokenizer.decode(expected(prompt, 100, vocab_size=vocab_size))
        assert slow_told.sources == [None]
        assert told.sources == [kv_address if takes_along else None]
        counted = f'penstock_gateway_kv_sources_total{{model="{NAME}",reason="moved"}} 1' in gateway.metrics()
        assert counted is takes_along
