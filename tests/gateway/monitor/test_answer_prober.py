from __future__ import annotations

import asyncio

import pytest

from penstock.core.slo import Slo
from penstock.gateway.monitor.answer_prober import AnswerProber
from penstock.gateway.settings.gateway import ModelSettings
from penstock.watch.settings import ProbeSettings
from penstock.watch.watch import Watch
from tests.gateway.provider import providing
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica
from tests.waiting import GIVE_UP_S, eventually, eventually_async


def asked(
    gateway: RunningGateway, *models: str, rounds: int = 1, **settings: object
) -> dict[tuple[str, str], list[str]]:
    """States of the replicas, by model and adapter."""

    async def ask() -> dict[tuple[str, str], list[str]]:
        watch = Watch({model: Slo() for model in models}, gateway.app.now())
        probes = ProbeSettings(every_s=0.01, **settings)  # type: ignore[arg-type]
        prober = AnswerProber(watch, probes, gateway.clock)
        gateway.app.replicas.subscribe(prober)
        for _ in range(rounds):
            await prober.round()
        found: dict[tuple[str, str], list[str]] = {}
        for view in prober.views():
            found.setdefault((view.model, view.adapter), []).append(view.state)
        return found

    return asyncio.run_coroutine_threadsafe(ask(), gateway.loop).result(GIVE_UP_S)


def test_every_replica_and_adapter_of_a_model_is_asked(two_replicas: list[Replica]) -> None:
    with running_gateway(*two_replicas) as gateway:
        found = asked(gateway, NAME, adapters={NAME: ["missing"]})
    assert found == {(NAME, ""): ["ok", "ok"], (NAME, "missing"): ["failed", "failed"]}


def test_who_gives_no_log_probabilities_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-secret-key")
    with providing() as mute, providing() as paid:
        pools = {
            "mute": ModelSettings(replicas=[mute.url], dialect="openai"),
            "paid": ModelSettings(replicas=[paid.url], key_env="KEY"),
        }
        with running_gateway(pools=pools) as gateway:
            assert asked(gateway, "mute", "paid", rounds=3) == {}
        assert len(mute.asked) == 1
        assert mute.asked[0]["logprobs"] is True
        assert paid.asked == []


def test_a_server_that_fails_is_told_of() -> None:
    with (
        providing(status=500) as broken,
        running_gateway(pools={"m": ModelSettings(replicas=[broken.url], dialect="openai")}) as gateway,
    ):
        assert asked(gateway, "m") == {("m", ""): ["failed"]}


def test_a_replica_that_is_lost_is_asked_nothing_more() -> None:
    with (
        providing(dawdles=True) as hung,
        running_gateway(pools={"m": ModelSettings(replicas=[hung.url], dialect="openai")}) as gateway,
    ):
        (replica,) = gateway.app.replicas.values()

        async def ask() -> bool:
            watch = Watch({"m": Slo()}, gateway.app.now())
            prober = AnswerProber(watch, ProbeSettings(every_s=0.01), gateway.clock)
            prober.replica_added(replica)
            round = asyncio.create_task(prober.round())
            await eventually_async(lambda: hung.asked)
            replica.send_away()
            await round
            return prober.views() == [] and not replica.in_flight  # nobody's answer, and nothing is left there

        assert asyncio.run_coroutine_threadsafe(ask(), gateway.loop).result(GIVE_UP_S)
        eventually(lambda: replica.upstream.num_open - replica.upstream.num_idle, lambda num_used: num_used == 0)
