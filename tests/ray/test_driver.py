"""The driver of Ray, on a fake cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.fleet_drivers import check_driver
from penstock.core.config import build
from penstock.core.errors import CapacityRefused, ConfigError, PenstockError
from penstock.core.settings import EngineSettings, ServerSettings, Settings
from penstock.core.slo import Slo
from penstock.fleet.drivers.driver import DriverReplica, ReplicaSpec
from penstock.fleet.drivers.ray import RayDriver
from penstock.fleet.drivers.ray_cluster import ActorView
from penstock.fleet.drivers.ray_process import RayProcess
from penstock.fleet.drivers.ray_settings import RaySettings
from penstock.fleet.policy.observation import CapacityType
from penstock.fleet.settings import FleetSettings
from tests.ray.fake_cluster import FakeRayCluster
from tests.waiting import eventually_async

SECRET = "its secret"
SETTINGS = Settings("m", EngineSettings(threads=2), ServerSettings(gateway_secret="another"), Slo())


class ManualClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cluster() -> FakeRayCluster:
    return FakeRayCluster({"one": {"CPU": 4, "GPU": 2, "zone:a": 1000}, "two": {"CPU": 4, "GPU": 2, "zone:b": 1000}})


def driver(cluster: FakeRayCluster, clock: ManualClock, fleet: str = "fleet", **settings: object) -> RayDriver:
    return RayDriver(build(FleetSettings, {"name": fleet, "ray": settings}), cluster, SECRET, clock=clock)


def spec(name: str, zone: str = "", **others: object) -> ReplicaSpec:
    return replace(ReplicaSpec(name, "a/pool", SETTINGS, zone=zone), **others)  # type: ignore[arg-type]


async def listed(driver: RayDriver) -> dict[str, DriverReplica]:
    return {one.id: one for one in await driver.list()}


def bundles(cluster: FakeRayCluster) -> list[Mapping[str, float]]:
    return [bundle for one in cluster.groups.values() for bundle in one.bundles]


async def test_the_next_controller_finds_replicas_as_they_were_started(
    cluster: FakeRayCluster, clock: ManualClock
) -> None:
    first = driver(cluster, clock)
    await first.start(spec("r", "b", gpus=2, capacity_type=CapacityType.SPOT))
    await first.start(spec("r", "b", gpus=2, capacity_type=CapacityType.SPOT))
    await first.close()
    (found,) = await driver(cluster, clock).list()
    assert found == DriverReplica("r", "a/pool", "http://two:1", "b", CapacityType.SPOT)
    assert await driver(cluster, clock, "another fleet").list() == []


async def test_the_secret_goes_to_the_actor_alone(cluster: FakeRayCluster, clock: ManualClock) -> None:
    await driver(cluster, clock).start(spec("r"))
    ((name, order),) = cluster.orders
    assert order.secret == SECRET
    assert SECRET not in name + order.config
    assert json.loads(order.config)["server"]["gateway_secret"] is None


async def test_an_engine_on_cpus_has_the_threads_that_it_reserves(cluster: FakeRayCluster, clock: ManualClock) -> None:
    unsaid = replace(SETTINGS, engine=EngineSettings())
    await driver(cluster, clock, cpus=3).start(spec("r", settings=unsaid))
    await driver(cluster, clock, cpus=3).start(spec("s", settings=SETTINGS))
    assert [json.loads(order.config)["engine"]["threads"] for _, order in cluster.orders] == [3, 2]


async def test_a_replica_reserves_what_it_needs(cluster: FakeRayCluster, clock: ManualClock) -> None:
    await driver(cluster, clock).start(spec("cpu"))
    await driver(cluster, clock).start(spec("gpu", "a", gpus=1))
    await driver(cluster, clock, cpus=0.5).start(spec("chosen", "b", gpus=1))
    assert bundles(cluster) == [
        {"CPU": 2.0},
        {"CPU": 1.0, "GPU": 1.0, "zone:a": 0.001},
        {"CPU": 0.5, "GPU": 1.0, "zone:b": 0.001},
    ]
    await cluster.add_node({"CPU": 1, "kind:spot": 1, "big": 1})
    marked = driver(cluster, clock, capacity_prefix="kind:", cpus=1, resources={"big": 1})
    await marked.start(spec("spot", capacity_type=CapacityType.SPOT))
    assert bundles(cluster)[-1] == {"CPU": 1.0, "big": 1.0, "kind:spot": 0.001}


async def test_capacity_that_is_not_there_is_refused_and_not_waited_for(
    cluster: FakeRayCluster, clock: ManualClock
) -> None:
    found = driver(cluster, clock)
    await found.start(spec("r", "a", gpus=2))
    with pytest.raises(CapacityRefused, match=r"no node with room for CPU 1, GPU 1, zone:a 0.001: .* are full"):
        await found.start(spec("s", "a", gpus=1))
    assert [*await listed(found)] == ["r"]
    assert len(cluster.groups) == 1


async def test_more_devices_than_one_node_has_are_refused_with_what_would_work(
    cluster: FakeRayCluster, clock: ManualClock
) -> None:
    """The GPUs of two nodes together would do, and an engine is on one."""
    with pytest.raises(CapacityRefused, match=r"none has more than 2 GPUs: `gpus: 2` would fit, or add a node with 4"):
        await driver(cluster, clock).start(spec("r", gpus=4))
    assert not cluster.groups


def ranks(tp: int = 1, pp: int = 1, **more: object) -> Settings:
    return replace(SETTINGS, engine=EngineSettings(tp=tp, pp=pp, **more))  # type: ignore[arg-type]


async def test_a_replica_of_more_gpus_than_a_node_has_is_on_as_few_nodes_as_have_them(
    cluster: FakeRayCluster, clock: ManualClock
) -> None:
    await driver(cluster, clock).start(spec("r", settings=ranks(2, 2), gpus=4))
    assert bundles(cluster) == [{"CPU": 1.0, "GPU": 2.0}] * 2
    (view,) = (await cluster.view("penstock/")).groups
    assert [*view.nodes] == ["one", "two"]
    (found,) = await driver(cluster, clock).list()
    assert (found.id, found.url) == ("r", "http://one:1")


async def test_nodes_of_a_replica_are_those_that_its_pool_or_engine_says(
    cluster: FakeRayCluster, clock: ManualClock
) -> None:
    await driver(cluster, clock, nodes=2, cpus=1).start(spec("r", settings=ranks(2), gpus=2))
    await driver(cluster, clock, cpus=1).start(spec("s", settings=ranks(1, 2, nnodes=2), gpus=2))
    assert bundles(cluster) == [{"CPU": 1.0, "GPU": 1.0}] * 4
    await driver(cluster, clock, nodes=2).start(spec("t", settings=ranks(2, threads=1)))
    assert bundles(cluster)[4:] == [{"CPU": 1.0}] * 2
    with pytest.raises(ConfigError, match="nodes is 2, but nnodes of the engine is 3") as refused:
        await driver(cluster, clock, nodes=2).start(spec("u", settings=ranks(3, nnodes=3)))
    assert refused.value.param == "ray.nodes"
    with pytest.raises(ConfigError, match="3 GPUs cannot be shared out among 2 nodes that have 1, 1 ranks"):
        await driver(cluster, clock, nodes=2).start(spec("v", settings=ranks(2), gpus=3))


async def test_stages_that_nodes_have_more_of_get_more_gpus_there(clock: ManualClock) -> None:
    cluster = FakeRayCluster({"one": {"CPU": 4, "GPU": 2}, "two": {"CPU": 4, "GPU": 4}})
    await driver(cluster, clock, nodes=2).start(spec("r", settings=ranks(2, 3), gpus=6))
    assert [one["GPU"] for one in bundles(cluster)] == [2.0, 4.0]


async def test_a_replica_over_nodes_that_loses_one_is_gone_as_one_and_starts_anew_elsewhere(
    cluster: FakeRayCluster, clock: ManualClock
) -> None:
    found, wide = driver(cluster, clock), ranks(2, 2)
    await found.start(spec("r", settings=wide, gpus=4))
    await cluster.drain_node("two", clock() + 30.0)
    assert (await listed(found))["r"].deadline_s == 30.0
    await cluster.lose_node("two")
    assert (await listed(found))["r"].failure == "node 1: its node is gone"
    await found.stop("r", 5.0)
    assert not cluster.groups
    with pytest.raises(CapacityRefused, match="none has more than 2 GPUs"):
        await found.start(spec("s", settings=wide, gpus=4))
    await cluster.add_node({"CPU": 4, "GPU": 2})
    await found.start(spec("s", settings=wide, gpus=4))
    assert [*await listed(found)] == ["s"]
    await found.stop("s", 7.0)
    assert cluster.graces_s == [7.0]


async def test_several_nodes_of_which_one_is_full_are_refused_with_what_is_missing(
    cluster: FakeRayCluster, clock: ManualClock
) -> None:
    found = driver(cluster, clock, nodes=2)
    await driver(cluster, clock).start(spec("r", "a", gpus=1))
    with pytest.raises(CapacityRefused, match=r"room for CPU 1, GPU 2 on each of 2 nodes: the nodes .* are full"):
        await found.start(spec("s", settings=ranks(4), gpus=4))
    with pytest.raises(CapacityRefused, match=r"a replica is on 2 nodes, and 1 node has CPU 1, GPU 1, zone:a 0\.001"):
        await found.start(spec("t", "a", settings=ranks(2), gpus=2))


async def test_a_stop_gives_the_grace_and_frees_the_resources(cluster: FakeRayCluster, clock: ManualClock) -> None:
    found = driver(cluster, clock)
    await found.start(spec("r", "a", gpus=2))
    await found.start(spec("r-2", "b"))
    await found.stop("r", 7.0)
    await found.stop("r", 7.0)
    assert cluster.graces_s == [7.0]
    assert [*await listed(found)] == ["r-2"]
    await found.start(spec("s", "a", gpus=2))


async def test_a_replica_that_has_ended_is_listed_until_it_is_stopped(
    cluster: FakeRayCluster, clock: ManualClock
) -> None:
    found = driver(cluster, clock)
    await found.start(spec("r", "a"))
    await found.start(spec("s", "b"))
    await cluster.lose_node("two")
    assert {name: one.failure for name, one in (await listed(found)).items()} == {"r": "", "s": "its node is gone"}
    await found.stop("s", 5.0)
    assert cluster.graces_s == []  # nobody is there to be told
    assert [*await listed(found)] == ["r"]


async def test_draining_nodes_become_notices(cluster: FakeRayCluster, clock: ManualClock) -> None:
    found = driver(cluster, clock)
    await found.start(spec("r", "a"))
    await found.start(spec("s", "b"))
    await cluster.drain_node("two", clock() + 90.0)
    assert {name: one.deadline_s for name, one in (await listed(found)).items()} == {"r": None, "s": 90.0}
    clock.advance(100.0)
    assert (await listed(found))["s"].deadline_s == 0.0
    await cluster.drain_node("one", 0.0)  # nobody said until when
    assert (await listed(found))["r"].deadline_s == 60.0


async def test_a_start_that_was_broken_off_is_not_listed_until_it_has_failed(
    cluster: FakeRayCluster, clock: ManualClock
) -> None:
    died = driver(cluster, clock)
    await died.start(spec("r"))
    (group,) = cluster.groups.values()
    group.actor = ActorView()  # the controller died before it was told to begin
    found = driver(cluster, clock)
    assert await found.list() == []
    clock.advance(60.0)
    assert (await listed(found))["r"].failure == "its start was never finished"
    await found.start(spec("r"))
    assert (await listed(found))["r"].failure == ""


async def test_a_start_under_way_is_listed(cluster: FakeRayCluster, clock: ManualClock) -> None:
    class Slow(FakeRayCluster):
        async def start_engine(self, *given: object) -> None:
            await asyncio.Event().wait()

    slow = Slow(cluster.resources)
    found = driver(slow, clock)
    starting = asyncio.create_task(found.start(spec("r")))
    await eventually_async(lambda: slow.groups)
    assert (await listed(found))["r"] == DriverReplica("r", "a/pool")
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert await found.list() == []


async def test_a_head_that_is_down_fails_the_call_and_nothing_else(cluster: FakeRayCluster, clock: ManualClock) -> None:
    found = driver(cluster, clock)
    await found.start(spec("r"))
    cluster.is_down = True
    with pytest.raises(PenstockError):
        await found.list()
    cluster.is_down = False
    assert (await listed(found))["r"].failure == ""


async def test_a_cluster_that_cannot_be_reached_fails_each_call(tmp_path: Path) -> None:
    """Where Ray is not installed the child process cannot even begin."""
    cluster = RayProcess("127.0.0.1:1", "penstock", tmp_path / "ray.log")
    for _ in range(2):
        with pytest.raises(PenstockError, match="Ray"):
            await cluster.view("penstock/")
    await cluster.close()


def test_a_placement_is_given_up_before_the_call_is() -> None:
    """Where Ray is not installed that is told first."""
    settings = build(FleetSettings, {"driver": "ray", "pools": {"m": {"ray": {"place_timeout_s": 30.0}}}})
    with pytest.raises(ConfigError, match=r"place_timeout_s|penstock\[ray\]"):
        check_driver(settings)


def test_a_pool_has_settings_of_its_own() -> None:
    settings = RaySettings(cpus=4, zone_prefix="az:")
    assert settings.of_pool("m", {"cpus": 2.0}) == RaySettings(cpus=2.0, zone_prefix="az:")
    with pytest.raises(ConfigError, match="one namespace"):
        settings.of_pool("m", {"namespace": "mine"})
    with pytest.raises(ConfigError, match=r"pools.m.ray.cpu"):
        settings.of_pool("m", {"cpu": 2})
