"""A gateway's replicas, followed for real: servers that say nothing of themselves, and engines that hang."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.core.replica import ReplicaState
from penstock.gateway.membership.factory import replicas_of
from penstock.gateway.replicas.replica import Replica as Followed
from penstock.gateway.settings.gateway import GatewaySettings, ModelSettings
from penstock.health.settings import HealthSettings
from tests.clocks import ManualClock
from tests.gateway.provider import Provider, providing
from tests.gateway.running import RunningGateway, running_gateway, slow_and_fast
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

QUICK = HealthSettings(probe_every_s=0.05, probe_timeout_s=0.5)
HUNG_SOON = HealthSettings(hung_after_s=0.4, silent_after_s=1000.0)
MESSAGES: Any = [{"role": "user", "content": "the first and the second"}]


def one_model(provider: Provider, **options: Any) -> dict[str, ModelSettings]:
    return {"m": ModelSettings(replicas=[provider.url], **options)}


@contextlib.contextmanager
def follows(pools: dict[str, ModelSettings], *, waits: bool = True) -> Iterator[RunningGateway]:
    with running_gateway(pools=pools, health=QUICK, waits=waits, clock=ManualClock()) as gateway:
        yield gateway


def only(gateway: RunningGateway) -> Followed:
    (replica,) = gateway.app.replicas.values()
    return replica


def ask(gateway: RunningGateway, model: str = "m", **options: Any) -> str | None:
    found = gateway.openai.chat.completions.create(model=model, messages=MESSAGES, **{"max_tokens": 5} | options)
    return found.choices[0].message.content


# -- servers without reports


@pytest.mark.parametrize(("health", "expected"), [(200, {"/health"}), (404, {"/health", "/v1/models"})])
def test_a_server_is_asked_for_what_it_knows(health: int, expected: set[str]) -> None:
    plain = {"dialect": "openai"}  # or it is asked what it is, first
    with providing(health=health) as provider, follows(one_model(provider, **plain)) as gateway:
        gateway.until(lambda: len(provider.probes) > 4)
        assert set(provider.probes) == expected
        assert provider.probes.count("/health") == 1 or health == 200
        assert ask(gateway) == "hello"


@pytest.mark.parametrize("status", [500, 401])
def test_a_server_that_never_passed_a_probe_gets_nothing(status: int) -> None:
    with providing(models=status) as provider, follows(one_model(provider), waits=False) as gateway:
        gateway.until(lambda: len(provider.probes) > 2)
        with pytest.raises(openai.InternalServerError, match="no replica of this model is ready"):
            ask(gateway)
        assert not provider.asked
        provider.models = 200
        gateway.until(lambda: only(gateway).snapshot.state is ReplicaState.READY)
        assert ask(gateway) == "hello"


def test_three_failed_probes_take_a_server_out_and_two_that_pass_bring_it_back_slowly() -> None:
    with providing() as provider, follows(one_model(provider)) as gateway:
        provider.models = 500
        num_probes = len(provider.probes)
        gateway.until(lambda: only(gateway).snapshot.state is ReplicaState.OUT)
        assert len(provider.probes) - num_probes == 3
        provider.models = 200
        num_probes = len(provider.probes)
        gateway.until(lambda: only(gateway).snapshot.state is ReplicaState.READY)
        assert len(provider.probes) - num_probes == 2
        first_share = only(gateway).snapshot.share
        assert first_share < 0.2
        gateway.until(lambda: only(gateway).snapshot.share > first_share)  # by time alone


def test_a_server_that_is_not_to_be_probed_is_not() -> None:
    with providing(models=500) as provider, follows(one_model(provider, dialect="openai", probe_every_s=0)) as gateway:
        assert ask(gateway) == "hello"
        gateway.advance(100.0)
        assert ask(gateway) == "hello"
        assert not provider.probes


def test_a_server_with_a_key_is_asked_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    pools = {"paid": ModelSettings(replicas=["https://api.example.com"], key_env="SOME_KEY")}
    assert [replica.probe_every_s for replica in replicas_of(pools)] == [60.0]


def test_a_deep_probe_finds_a_server_that_answers_and_generates_nothing() -> None:
    with providing(status=500) as provider:
        pools = one_model(provider, deep_probe_every_s=0.05)
        with follows(pools) as gateway:
            gateway.until(lambda: only(gateway).snapshot.state is ReplicaState.OUT)
            assert provider.asked[0]["max_tokens"] == 1
            provider.status = 200
            gateway.until(lambda: only(gateway).snapshot.state is ReplicaState.READY)


def test_a_deep_probe_is_a_request_in_flight_at_its_server() -> None:
    with providing(dawdles=True) as provider, follows(one_model(provider, deep_probe_every_s=0.05)) as gateway:
        gateway.until(lambda: len(only(gateway).in_flight), lambda num: num == 1)
        provider.may_answer.set()
        gateway.until(gateway.is_idle)
        assert provider.asked[0]["max_tokens"] == 1
        assert gateway.states() == ["ready"]


# -- penstock replicas


def stop_engine(replica: Replica) -> int:
    pid = replica.processes[-1].pid
    os.kill(pid, signal.SIGSTOP)
    return pid


def by_port(gateway: RunningGateway, replica: Replica) -> Followed:
    return gateway.app.replicas[f"http://{replica.host}:{replica.port}"]


def test_streams_go_on_when_an_engine_hangs_behind_a_server_that_lives() -> None:
    with slow_and_fast(health=HUNG_SOON) as (gateway, one, two), ThreadPoolExecutor(6) as clients:
        options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 100, "temperature": 0}
        options["extra_body"] = {"ignore_eos": True}
        whole = two.openai.chat.completions.create(**options).choices[0].message.content

        def stream(_: int) -> str:
            chunks = gateway.openai.chat.completions.create(stream=True, **options)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        found = clients.map(stream, range(6))
        eventually(lambda: one.engine.measured.load.num_running, lambda num_running: num_running == 6)
        gateway.set_in_use(two, True)
        pid = stop_engine(one)
        try:
            hung = by_port(gateway, one)
            while hung.snapshot.state is not ReplicaState.OUT:
                gateway.advance(1.0)
                hears_again(hung)
            assert one.call("GET", "/health")[0] == 200
            assert one.call("GET", "/ready")[0] == 200
            assert list(found) == [whole] * 6
            for _ in range(2):
                hears_again(hung)
            assert hung.snapshot.state is ReplicaState.OUT  # though its reports keep coming, and it has nothing to do
        finally:
            os.kill(pid, signal.SIGCONT)
        comes_back(gateway, hung)
        assert hung.snapshot.share < 0.5
        eventually(gateway.is_idle)


def hears_again(replica: Followed) -> None:
    report = replica.report
    eventually(lambda: replica.report is not report)


def comes_back(gateway: RunningGateway, replica: Followed) -> None:
    """By deep probes, which its engine answers: two of them, a second apart."""
    way = replica.upstream
    while replica.snapshot.state is not ReplicaState.READY:
        gateway.advance(1.0)
        eventually(lambda: way.num_open - way.num_idle, lambda num_used: num_used <= 2)  # reports, and news of blocks


def test_an_engine_that_hangs_while_idle_is_found_by_deep_probes() -> None:
    health = HealthSettings(deep_probe_every_s=5.0, deep_probe_timeout_s=2.0, silent_after_s=1000.0, out_after=2)
    with serving() as one, running_gateway(one, health=health, clock=ManualClock()) as gateway:
        pid = stop_engine(one)
        try:
            while only(gateway).snapshot.state is not ReplicaState.OUT:
                gateway.advance(0.5)
            assert 6.0 < gateway.clock.now_s - 1000.0 < 14.0  # idle for five seconds, two probes that took two, a pause
        finally:
            os.kill(pid, signal.SIGCONT)
        comes_back(gateway, only(gateway))


def test_health_is_set_in_one_group() -> None:
    values = {"health": {"hung_after_s": 5.0, "breaker": {"open_s": 1.0}, "slow_start": {"ramp_s": 3.0}}}
    settings = build(GatewaySettings, values)
    assert (settings.health.hung_after_s, settings.health.breaker.open_s) == (5.0, 1.0)
    with pytest.raises(ConfigError, match=r"did you mean 'health.hung_after_s'"):
        build(GatewaySettings, {"health": {"hang_after_s": 5.0}})
