"""An adapter as the router sees it: a replica without it is passed over, one with it on the device is preferred."""

from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError
from penstock.core.replica import ReplicaSnapshot
from penstock.router.request import EdgeRequest
from penstock.router.router import Router
from penstock.router.routes import PoolShare, Route, RouteTable, Target, Version
from penstock.router.scorers import by_adapter
from tests.snapshots import snapshot


def replica(name: str, *adapters: str, warm: tuple[str, ...] = (), running: int = 0) -> ReplicaSnapshot:
    return snapshot(
        id=name, models=("m",), adapters=frozenset(adapters), warm_adapters=frozenset(warm), num_running=running
    )


def request(adapter: str = "") -> EdgeRequest:
    return EdgeRequest("r", "m", prompt_tokens=10, max_tokens=10, adapter=adapter)


def test_replica_without_the_adapter_is_passed_over() -> None:
    replicas = [replica("none"), replica("other", "bard"), replica("has", "poet", running=40)]
    choice = Router().pick(request("poet"), replicas, now=0.0)
    assert choice.replica is not None
    assert choice.replica.id == "has"
    assert choice.dropped == {"none": "no_adapter", "other": "no_adapter"}
    assert Router().pick(request("sonnet"), replicas, now=0.0).replica is None
    assert not Router().pick(request(), replicas, now=0.0).dropped


def test_replica_with_the_adapter_on_its_device_is_preferred_until_it_is_busier() -> None:
    def picked(running: int) -> str:
        cold, warm = replica("cold", "poet"), replica("warm", "poet", warm=("poet",), running=running)
        choice = Router().pick(request("poet"), [cold, warm], now=0.0)
        assert choice.replica is not None
        return choice.replica.id

    assert picked(running=4) == "warm"
    assert picked(running=400) == "cold"


def test_about_a_request_without_adapter_there_is_nothing_to_say() -> None:
    replicas = [replica("a", "poet", warm=("poet",)), replica("b", "poet")]
    assert by_adapter(request(), replicas) is None
    assert by_adapter(request("poet"), replicas) == [1.0, 0.0]


def test_adapter_is_where_its_model_is_and_follows_its_shares() -> None:
    base = Route("m", versions=(Version("1", 0.9, pool="m@1"), Version("2", 0.1, shadow=0.5, pool="m@2")))
    table = RouteTable([base, Route("poet", adapter_of="m")])
    poet = table.find("poet")
    assert (poet.adapter, poet.model, base.adapter) == ("poet", "poet", "")
    assert poet.pools == (PoolShare("m@1", 0.9, "m@1"), PoolShare("m@2", 0.1, "m@2"))
    assert poet.target(0.0) == Target("m@1", "m@1", "poet")
    assert poet.shadows(0.0, "m@1") == []
    moved = table.with_routes([base.with_shares({"1": 0.0, "2": 1.0}, {}, revision=1)])
    assert [share.weight for share in moved.find("poet").pools] == [0.0, 1.0]


def test_adapter_of_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="'poet' is an adapter of 'nobody', which is no model with replicas"):
        RouteTable([Route("poet", (), adapter_of="nobody")])
