"""A request that replicas do not survive: it meets two of them, whatever it does, and is then refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from tools.drills.call import Call, begin, post

from penstock.core.errors import RequestQuarantined
from penstock.health.quarantine import ALIBI_TOKENS, Losses, Quarantine
from tests.gateway.poison import Fleet, mortal_fleet
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME
from tests.waiting import GIVE_UP_S, eventually, eventually_async


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with mortal_fleet(3) as found:
        yield found


@pytest.fixture
def gateway(fleet: Fleet) -> Iterator[RunningGateway]:
    eventually(lambda: [replica.engine.state for replica in fleet.replicas], lambda states: set(states) == {"ready"})
    fleet.num_killed = 0
    with running_gateway(*fleet.replicas) as found:
        yield found
        eventually(found.is_idle)


async def ask(gateway: RunningGateway, prompt: str, key: str, *, stream: bool, tokens: int = 40) -> Call:
    body: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
    call = await begin(gateway.port, post("/v1/completions", body | {"ignore_eos": True}, key))
    async with asyncio.timeout(GIVE_UP_S):
        await call.ended
    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stream", "after_events"), [(False, 0), (True, 0), (True, 1), (True, 3)], ids=["whole", "before", "first", "third"]
)
async def test_a_request_takes_two_replicas_with_it_and_is_refused_then(
    fleet: Fleet, gateway: RunningGateway, caplog: pytest.LogCaptureFixture, stream: bool, after_events: int
) -> None:
    fleet.after_events = after_events
    attacker, other = gateway.add_tenant("attacker"), gateway.add_tenant("other")
    with caplog.at_level(logging.ERROR):
        refused = await ask(gateway, "poison", attacker, stream=stream)
    assert fleet.num_killed == 2
    if after_events:
        assert b'"code":"request_quarantined"' in refused.body
    else:
        assert (refused.status, refused.json()["error"]["code"]) == (422, "request_quarantined")
    (usage,) = await eventually_async(
        lambda: [one for one in gateway.ledger.usages if one.tenant_id == "attacker" and one.requests]
    )
    assert usage.input_tokens > 0  # billed what it used, or might have
    assert any("attacker" in record.message and "lost with it" in record.message for record in caplog.records)
    assert 'penstock_gateway_requests_quarantined_total{model="small"} 1' in gateway.metrics()

    again = await ask(gateway, "poison", attacker, stream=stream)
    assert (again.status, again.json()["error"]["code"]) == (422, "request_quarantined")
    assert fleet.num_killed == 2
    for prompt, key in (("something else", attacker), ("anything", other)):
        assert (await ask(gateway, prompt, key, stream=stream)).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("after_events", [0, 2], ids=["before", "after"])
async def test_streams_of_others_outlive_the_replicas_that_a_request_takes_with_it(
    fleet: Fleet, gateway: RunningGateway, after_events: int
) -> None:
    fleet.after_events = after_events
    attacker, other = gateway.add_tenant("attacker"), gateway.add_tenant("other")
    body = {"model": NAME, "max_tokens": 400, "temperature": 0, "stream": True, "ignore_eos": True}
    calls = [
        await begin(gateway.port, post("/v1/completions", body | {"prompt": f"stream {number}"}, other))
        for number in range(12)
    ]
    await asyncio.gather(*(call.at_event(ALIBI_TOKENS + 4) for call in calls))
    await ask(gateway, "poison", attacker, stream=True)
    assert fleet.num_killed == 2
    async with asyncio.timeout(GIVE_UP_S):
        await asyncio.gather(*(call.ended for call in calls))
    assert all(call.body.endswith(b"data: [DONE]\n\n") for call in calls)


def test_a_request_goes_to_no_third_replica_whatever_its_alibi() -> None:
    losses = Losses()
    losses.add("a", 0)
    assert not losses.is_culprit
    assert losses.forbidden(["a", "b", "c"]) == frozenset()
    losses.add("b", ALIBI_TOKENS)
    assert not losses.is_culprit  # it ran there for a while
    assert losses.forbidden(["a", "b", "c"]) == {"c"}
    assert losses.forbidden(["c", "d"]) == frozenset()  # neither can come back
    losses.add("a", ALIBI_TOKENS - 1)
    assert losses.is_culprit


def test_those_that_had_just_come_are_kept_apart_from_the_others_of_the_same_loss() -> None:
    new, old = Losses(), Losses()
    new.add("a", 0)
    old.add("a", 100)
    ready = {"b", "c", "d"}
    (trial,) = ready - new.apart(ready)
    assert old.apart(ready) == {trial}
    assert new.apart({"b"}) == old.apart({"b"}) == frozenset()  # there is no choice


def test_a_quarantine_is_of_one_tenants_body_and_ends() -> None:
    held = Quarantine()
    held.add("a", b"/p", b"body", 0.0)
    for tenant, path, body in (("b", b"/p", b"body"), ("a", b"/q", b"body"), ("a", b"/p", b"other")):
        held.check(tenant, path, body, 1.0)
    with pytest.raises(RequestQuarantined):
        held.check("a", b"/p", b"body", 599.0)
    held.check("a", b"/p", b"body", 600.0)
    assert len(held) == 0


def test_a_quarantine_is_bounded() -> None:
    held = Quarantine()
    for number in range(5000):
        held.add("a", b"/p", b"%d" % number, float(number) / 1e3)
    assert len(held) == 4096
    held.check("a", b"/p", b"0", 5.0)
    with pytest.raises(RequestQuarantined):
        held.check("a", b"/p", b"4999", 5.0)
