"""Advisory pools: the controller decides, records and tells, and starts and stops nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.fleet.drivers.driver import DriverReplica, ReplicaNote
from penstock.fleet.settings import FleetSettings
from penstock.tenancy.fleet import PoolDemand
from penstock.tenancy.store import Store
from tests.fleet.fake_fleet import FakeDriver, FakeFleet, leading

URL = "http://10.0.0.1:8000"


class FakeNotingDriver(FakeDriver):
    notes: Mapping[str, ReplicaNote] = {}

    def note(self, notes: Mapping[str, ReplicaNote]) -> None:
        self.notes = notes


async def test_an_advisory_pool_wants_replicas_and_starts_none(store: Store) -> None:
    fleet = FakeFleet(store, advisory=True, min=2, max=8, scale_on={"waiting": 1.0}, up_cooldown_s=1.0)
    store.fleet._clock = lambda: fleet.now
    controller = await leading(fleet)
    await fleet.run(controller, 5)
    (status,) = store.fleet.pools()
    assert (status.wanted, status.states, fleet.driver.started) == (2, {}, {})
    for name in ("a", "b"):  # somebody else has started them
        fleet.driver.replicas[name] = DriverReplica(name, "m", URL)
    for _ in range(60):
        store.fleet.write_demand([PoolDemand("g", "m", fleet.now, waiting=50, waiting_tokens=5000)])
        await fleet.run(controller, 1)
    (status,) = store.fleet.pools()
    assert (status.wanted, status.states) == (3, {"active": 2})
    assert (status.counts.get("start"), fleet.driver.started) == (None, {})
    decisions = store.fleet.decisions("m")
    assert 1 < len(decisions) <= 10  # what is wanted is recorded when it changes


async def test_replicas_of_an_advisory_pool_are_followed_and_never_stopped(store: Store) -> None:
    fleet = FakeFleet(store, advisory=True, min=0, max=4, idle_s=1.0, down_cooldown_s=1.0)
    fleet.driver = driver = FakeNotingDriver()
    fleet.client._driver = driver
    driver.replicas["pod-1"] = DriverReplica("pod-1", "m", URL, is_ready=False)
    controller = await leading(fleet)
    await fleet.run(controller, 1)
    assert fleet.states() == {"starting": 1}
    driver.replicas["pod-1"] = replace(driver.replicas["pod-1"], is_ready=True)
    await fleet.run(controller, 100)
    assert fleet.states() == {"active": 1}
    assert fleet.members() == {}  # gateways find it by their own discovery
    assert driver.notes["pod-1"].state == "active"
    (status,) = store.fleet.pools()
    assert status.wanted == 0  # nothing is asked, and yet it is not stopped
    assert "pod-1" in driver.replicas
    driver.replicas["pod-1"] = replace(driver.replicas["pod-1"], deadline_s=10.0)
    await fleet.run(controller, 1)
    assert fleet.states() == {"draining": 1}
    driver.fails_to_list = True
    await fleet.run(controller, 1)
    assert fleet.states() == {"draining": 1}  # what was known stays
    driver.fails_to_list = False
    del driver.replicas["pod-1"]
    await fleet.run(controller, 10)
    assert fleet.states() == {}


async def test_a_successor_goes_on_with_the_replicas_of_an_advisory_pool(store: Store) -> None:
    fleet = FakeFleet(store, advisory=True, min=1)
    fleet.driver.replicas["pod-1"] = DriverReplica("pod-1", "m", URL)
    await fleet.run(await leading(fleet), 3)
    await fleet.run(await leading(fleet), 3)
    (row,) = store.fleet.replicas()
    assert (row.state, row.created_at) == ("active", 1_000_000.0)


def test_a_pool_is_advisory_as_its_fleet_is_unless_it_says() -> None:
    pools = FleetSettings(advisory=True, pools={"a": {}, "b": {"advisory": False}}).pool_settings()
    assert {name: pool.advisory for name, pool in pools.items()} == {"a": True, "b": False}
