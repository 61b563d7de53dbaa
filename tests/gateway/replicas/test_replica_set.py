"""Replicas that come and go while a gateway runs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
from tools.drills.call import begin, post

from penstock.gateway.membership.factory import replicas_of
from penstock.gateway.replicas.replica import Replica as Known
from penstock.gateway.settings.gateway import ModelSettings
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

MANY = 10_000


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    with serving(step_s=0.01) as one, serving(step_s=0.01) as two:
        yield [one, two]


def known(gateway: RunningGateway, url: str, model: str = NAME) -> Known:
    (replica,) = replicas_of({model: ModelSettings(replicas=[url])}, clock=gateway.clock)
    return replica


def add(gateway: RunningGateway, replica: Replica) -> str:
    url = f"http://{replica.host}:{replica.port}"
    gateway.call(lambda: gateway.app.replicas.add(known(gateway, url)))
    return url


def body(tokens: int) -> dict[str, object]:
    return {"model": NAME, "prompt": "hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}


async def test_a_replica_that_is_added_gets_requests_and_one_that_is_removed_gets_none(replicas: list[Replica]) -> None:
    one, two = replicas
    with running_gateway(one) as gateway:
        url = await asyncio.to_thread(add, gateway, two)
        await asyncio.to_thread(eventually, gateway.states, lambda states: states == ["ready", "ready"])
        first = f"http://{one.host}:{one.port}"
        gateway.call(lambda: gateway.app.replicas.remove(first))
        calls = [await begin(gateway.port, post("/v1/completions", body(3))) for _ in range(4)]
        async with asyncio.timeout(GIVE_UP_S):
            await asyncio.gather(*(call.ended for call in calls))
        assert all(call.body.endswith(b"data: [DONE]\n\n") for call in calls)
        assert [replica.id for replica in gateway.app.replicas.values()] == [url]
        assert [seen.id for seen in gateway.app.admission.replicas(NAME)] == [url]


async def test_a_stream_goes_on_when_its_replica_is_removed(replicas: list[Replica]) -> None:
    one, two = replicas
    with running_gateway(one) as gateway:
        call = await begin(gateway.port, post("/v1/completions", body(200)))
        await call.at_event(5)
        await asyncio.to_thread(add, gateway, two)
        await asyncio.to_thread(eventually, gateway.states, lambda states: states == ["ready", "ready"])
        gateway.call(lambda: gateway.app.replicas.remove(f"http://{one.host}:{one.port}"))
        async with asyncio.timeout(GIVE_UP_S):
            await call.ended
        assert call.body.endswith(b"data: [DONE]\n\n")
        assert len({event["id"] for event in call.events()}) == 1
        assert sum(len(event["choices"]) for event in call.events() if event.get("choices")) > 5
        await asyncio.to_thread(eventually, gateway.is_idle)


@pytest.mark.slow
def test_ten_thousand_joins_and_leaves_leave_nothing_behind(replicas: list[Replica]) -> None:
    """Each replica has a name of its own, as pods do, and some are of models that nobody has heard of."""
    with running_gateway(replicas[0]) as gateway:
        app = gateway.app

        def churn(first: int, last: int) -> None:
            for number in range(first, last):
                url = f"http://127.0.{number >> 8 & 255}.{number & 255}:9"
                replica = known(gateway, url, NAME if number % 2 else f"model-{number}")
                app.replicas.add(replica)
                app.replicas.changed(replica)
                app.replicas.remove(replica.id)
            app.pools.keep({NAME})

        def num_objects() -> int:
            gc.collect()
            return len(gc.get_objects())

        gateway.call(lambda: churn(0, 500))
        before = gateway.call(num_objects)
        for first in range(500, MANY, 500):
            gateway.call(lambda first=first: churn(first, first + 500))
        most = before + 2_500  # the clock of tests sweeps after 256 timers
        eventually(lambda: gateway.call(num_objects), lambda now: now < most)
        assert len(app.replicas) == len(app.admission.replicas(NAME)) == len(app.pools) == 1
