"""The contract of every driver, whatever its replicas are: tests to be imported where a fixture `driver` is one."""

from __future__ import annotations

from penstock.core.settings import EngineSettings, ServerSettings, Settings
from penstock.core.slo import Slo
from penstock.fleet.drivers.driver import Driver, ReplicaSpec
from penstock.fleet.policy.observation import CapacityType


def spec(replica: str, zone: str = "", capacity_type: CapacityType = CapacityType.ON_DEMAND) -> ReplicaSpec:
    settings = Settings("smollm2", EngineSettings(), ServerSettings(name="pool"), Slo())
    return ReplicaSpec(replica, "pool", settings, zone=zone, capacity_type=capacity_type)


async def ids(driver: Driver) -> list[str]:
    return [one.id for one in await driver.list()]


async def test_starting_and_stopping_twice_is_the_same_as_once(driver: Driver) -> None:
    for _ in range(2):
        await driver.start(spec("pool-1"))
    await driver.start(spec("pool-2"))
    assert await ids(driver) == ["pool-1", "pool-2"]
    for _ in range(2):
        await driver.stop("pool-1", 30.0)
    await driver.stop("never-was", 0.0)
    assert await ids(driver) == ["pool-2"]


async def test_a_replica_is_listed_as_it_was_asked_for(driver: Driver) -> None:
    assert await ids(driver) == []
    await driver.start(spec("pool-1", "west", CapacityType.SPOT))
    (found,) = await driver.list()
    assert (found.pool, found.zone, found.capacity_type) == ("pool", "west", CapacityType.SPOT)
    assert (found.url, found.deadline_s) == ("", None)
