"""A gateway whose replicas load their model: requests are told to come back, whatever their length."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import openai
import pytest

from penstock.core.clock import MonotonicClock
from penstock.core.settings import ServerSettings
from penstock.core.slo import Slo
from penstock.engine.client import EngineClient
from penstock.gateway.monitor.fleet_reader import FleetReader
from penstock.gateway.monitor.state import state_of
from penstock.gateway.settings.gateway import ModelSettings
from penstock.server.app import Replica
from penstock.server.recorder import Recorder
from tests.api.serving import running
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, serving
from tests.waiting import eventually

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


async def never(theirs: socket.socket) -> asyncio.subprocess.Process:
    raise AssertionError("the engine is not started in these tests")


@contextlib.contextmanager
def loading() -> Iterator[str]:
    """The address of a replica whose model never becomes ready."""
    clock = MonotonicClock()
    app = Replica(EngineClient(never, clock), Recorder(clock, NAME, Slo()), clock, ServerSettings())
    with running(app) as (host, port):
        yield f"http://{host}:{port}"


@contextlib.contextmanager
def fronting(*urls: str) -> Iterator[RunningGateway]:
    """A gateway that has heard of each of these replicas."""
    with running_gateway(pools={NAME: ModelSettings(replicas=list(urls))}, waits=False) as gateway:
        eventually(lambda: all(replica.report is not None for replica in gateway.app.replicas.values()))
        yield gateway


def refusal(gateway: RunningGateway, max_tokens: int) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as refused:
        gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=max_tokens)
    return refused.value


def test_requests_are_told_to_come_back_while_every_replica_loads() -> None:
    with loading() as url, fronting(url) as gateway:
        found = refusal(gateway, max_tokens=5)
        assert (found.status_code, found.code) == (503, "engine_unavailable")
        assert int(found.response.headers["retry-after"]) >= 1
        (replica,) = gateway.app.replicas.values()
        assert replica.snapshot.state == "out"
        (view,) = gateway.call(
            lambda: state_of([replica], gateway.app.pools, gateway.app.admission, gateway.app.now())
        ).replicas
        assert view.state == "starting"
        reader = FleetReader(gateway.app.replicas, gateway.app.admission)
        gateway.call(lambda: gateway.app.replicas.subscribe(reader))
        (reading,) = gateway.call(lambda: reader.read(gateway.app.now())).replicas
        assert (reading.is_starting, reading.is_usable) == (True, False)


def test_request_too_long_for_the_ready_replica_may_fit_the_one_that_loads() -> None:
    with loading() as url, serving(num_blocks=16, block_size=16) as short:
        with fronting(url, f"http://{short.host}:{short.port}") as gateway:
            eventually(gateway.states, lambda states: states == ["out", "ready"])
            found = refusal(gateway, max_tokens=1000)
            assert found.status_code == 503
            assert "no replica that is ready has a context of this length" in found.message
        with running_gateway(short) as gateway:
            assert refusal(gateway, max_tokens=1000).code == "context_length_exceeded"
