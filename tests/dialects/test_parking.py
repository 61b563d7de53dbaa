"""Parking replicas of any engine: the requests that say it, asked of our replica and of the fakes of others."""

from __future__ import annotations

from functools import partial

import pytest

from penstock.core.errors import Conflict, EngineUnavailable, UnsupportedTask
from penstock.dialects.engines import DIALECTS
from penstock.dialects.liveness import Answer
from penstock.dialects.parking import Ask, park, wake
from penstock.http.ask import ask
from tests.dialects.servers import FakeServer, FakeSglang, FakeTgi, FakeVllm
from tests.server.replica import serving
from tests.waiting import GIVE_UP_S


def asking(url: str) -> Ask:
    async def one(method: str, path: str, body: bytes | None) -> Answer:
        found = ask(url, method, path, body, headers={"content-type": "application/json"}, timeout_s=GIVE_UP_S)
        named = {name.encode(): value.encode() for name, value in found.headers.items()}
        return Answer(found.status, named, found.body)

    return one


@pytest.mark.parametrize("named", [True, False], ids=["named", "found out"])
@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang], ids=lambda kind: kind.__name__)
async def test_other_engines_are_parked_when_they_are_idle_and_woken_to_a_token(
    kind: type[FakeServer], named: bool
) -> None:
    with kind() as fake:
        change = partial(park, asking(fake.url), DIALECTS[fake.dialect] if named else None)
        fake.running, fake.waiting = 1, 2
        with pytest.raises(Conflict, match="3 requests are still open"):
            await change()
        assert not fake.is_parked
        fake.running = fake.waiting = 0
        assert (await change()).state == "parked"
        assert fake.is_parked
        assert (await wake(asking(fake.url), DIALECTS[fake.dialect] if named else None)).state == "ready"
        assert not fake.is_parked
    if isinstance(fake, FakeVllm):
        path, asked, _ = fake.asked[-1]
        assert (path, asked["model"], asked["max_tokens"]) == ("/v1/completions", "m", 1)


async def test_an_engine_that_was_not_started_for_it_says_what_it_needs() -> None:
    with FakeVllm(can_park=False) as fake:
        with pytest.raises(UnsupportedTask, match="--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"):
            await park(asking(fake.url))
        fake.is_parked = True  # and a wake that brings no token is none
        with pytest.raises(UnsupportedTask, match="/wake_up"):
            await wake(asking(fake.url))
        fake.can_park, fake.is_overloaded = True, True
        with pytest.raises(EngineUnavailable, match="full"):
            await wake(asking(fake.url))


async def test_an_engine_without_such_a_state_cannot_be_parked() -> None:
    with FakeTgi() as fake, pytest.raises(UnsupportedTask, match="tgi"):
        await park(asking(fake.url))


async def test_a_penstock_replica_is_parked_and_woken_by_the_same_calls() -> None:
    with serving() as replica:
        url = f"http://{replica.host}:{replica.port}"
        parked = await park(asking(url), wait_s=5.0)
        assert parked.state == "parked"
        assert parked.num_bytes > 0
        assert (await wake(asking(url))).seconds["first_token"] >= 0
        replica.loop.call_soon_threadsafe(replica.app.drain.begin, "the GPU is broken")
        with pytest.raises(Conflict, match="the GPU is broken"):
            await park(asking(url), DIALECTS["penstock"])
