"""Controllers that lose their store or their driver: one acts, nothing is started twice, and other pools go on."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from penstock.fleet.controller import Controller
from penstock.fleet.settings import FleetSettings
from penstock.tenancy.store import Store, open_store
from tests.fleet.fake_fleet import FakeFleet, leading
from tests.waiting import eventually_async


@contextmanager
def partitioned(store: Store) -> Iterator[None]:
    """SQLite refuses every statement of this store's connection. A transaction that it is in the middle of is rolled
    back, as a server does whose client is gone: else it would keep everybody else out."""

    def judge(action: int, operation: str | None, *_: object) -> int:
        is_end = action == sqlite3.SQLITE_TRANSACTION and operation == "ROLLBACK"
        return sqlite3.SQLITE_OK if is_end else sqlite3.SQLITE_DENY

    connection = store.fleet._database._connection  # type: ignore[attr-defined]
    connection.set_authorizer(judge)
    try:
        yield
    finally:
        connection.set_authorizer(None)


@asynccontextmanager
async def running(controller: Controller) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(controller.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def quick(fleet: FakeFleet) -> FakeFleet:
    """Rounds and leases of a fraction of a second: these controllers run by themselves."""
    fleet.settings = FleetSettings(every_s=0.01, lease_s=0.3, pools=fleet.settings.pools)
    return fleet


async def test_controller_without_its_store_begins_nothing_and_leads_again_when_it_is_back(store: Store) -> None:
    fleet = quick(FakeFleet(store))
    controller = fleet.controller(is_alone=False)
    async with running(controller) as task:
        await eventually_async(fleet.states, lambda found: found == {"active": 2})
        with partitioned(store):
            lost = next(iter(fleet.driver.replicas))
            del fleet.driver.replicas[lost]
            fleet.now += 60.0  # the driver has lost it, and nobody may act on that
            await eventually_async(lambda: controller.is_leader, lambda leads: not leads)
            assert len(fleet.driver.started) == 2
            assert not task.done()
        await eventually_async(lambda: {row.id for row in store.fleet.replicas()}, lambda found: lost not in found)
        await eventually_async(fleet.states, lambda found: found == {"active": 2})
    assert max(fleet.driver.started.values()) == 1
    assert {row.id for row in store.fleet.replicas()} == set(fleet.driver.replicas)


async def test_of_three_controllers_one_acts_while_each_in_turn_loses_the_store(store: Store, tmp_path: Path) -> None:
    fleet = quick(FakeFleet(store))
    with ExitStack() as stack:
        stores = [stack.enter_context(open_store(f"sqlite:///{tmp_path / 'penstock.db'}")) for _ in range(3)]
        controllers = [fleet.controller(is_alone=False, store=one) for one in stores]

        def leaders() -> list[int]:
            return [index for index, one in enumerate(controllers) if one.is_leader]

        async with running(controllers[0]), running(controllers[1]), running(controllers[2]):
            for _ in controllers:
                (leader,) = await eventually_async(leaders, lambda found: len(found) == 1)
                await eventually_async(fleet.states, lambda found: found == {"active": 2})
                with partitioned(stores[leader]):
                    await eventually_async(leaders, lambda found, old=leader: found and found != [old])
        assert max(fleet.driver.started.values()) == 1
        assert {row.id for row in store.fleet.replicas()} == set(fleet.driver.replicas)


def with_two_pools(store: Store, **pool: object) -> FakeFleet:
    fleet = FakeFleet(store, min=1, **pool)
    fleet.settings = FleetSettings(
        every_s=0.001, driver_timeout_s=0.005, pools={**fleet.settings.pools, "other": {"min": 1}}
    )
    return fleet


async def test_driver_that_hangs_in_a_start_is_given_up_ever_later_and_other_pools_go_on(store: Store) -> None:
    fleet = with_two_pools(store)
    fleet.driver.hangs = {"start m"}
    controller = await leading(fleet)
    await fleet.run(controller, 60, waits=True)
    assert {one.pool for one in fleet.driver.replicas.values()} == {"other"}
    assert 3 <= fleet.driver.num_hung["start m"] <= 6  # 2, 4, 8, 16, 32 s between them
    hung, other = store.fleet.pools()
    assert "the driver did not answer within" in hung.failure
    assert (hung.start_failures, other.start_failures) == (fleet.driver.num_hung["start m"], 0)
    fleet.driver.hangs.clear()
    await fleet.run(controller, 70, waits=True)
    assert fleet.states() == {"active": 2}


async def test_driver_that_hangs_in_a_stop_is_asked_again_ever_later(store: Store) -> None:
    fleet = with_two_pools(store)
    controller = await leading(fleet)
    await fleet.run(controller, 4, waits=True)
    (old,) = (name for name, one in fleet.driver.replicas.items() if one.pool == "m")
    fleet.driver.hangs = {"stop m"}
    fleet.driver.lose(old)
    await fleet.run(controller, 60, waits=True)
    assert fleet.states() == {"active": 2, "stopping": 1}  # its successor did not wait for it
    assert 3 <= fleet.driver.num_hung["stop m"] <= 6
    (row,) = (one for one in store.fleet.replicas() if one.state == "stopping")
    assert "the driver did not answer within" in row.failure
    fleet.driver.hangs.clear()
    await fleet.run(controller, 70, waits=True)
    assert fleet.states() == {"active": 2}
    assert old not in fleet.driver.replicas


@pytest.mark.parametrize("fault", ["hangs", "fails"])
async def test_driver_that_does_not_list_its_replicas_is_asked_for_no_others_and_costs_none(
    store: Store, fault: str
) -> None:
    fleet = with_two_pools(store, max=4)
    controller = await leading(fleet)
    await fleet.run(controller, 4, waits=True)
    fleet.driver.hangs, fleet.driver.fails_to_list = {"list"} if fault == "hangs" else set(), fault == "fails"
    fleet.settings.pools["m"]["min"] = 2
    controller = await leading(fleet)
    await fleet.run(controller, 120, waits=True)
    assert sorted(fleet.members().values()) == [False, False]  # what was there serves on
    assert len(fleet.driver.started) == 2
    assert all("list" in status.failure and status.start_failures >= 3 for status in store.fleet.pools())
    fleet.driver.hangs, fleet.driver.fails_to_list = set(), False
    await fleet.run(controller, 130, waits=True)
    assert fleet.states() == {"active": 3}
    assert not any(status.start_failures for status in store.fleet.pools())


async def test_start_that_a_driver_refuses_with_an_error_is_not_tried_each_second(store: Store) -> None:
    fleet = FakeFleet(store, min=1)
    fleet.driver.fails = True
    controller = await leading(fleet)
    await fleet.run(controller, 30)
    assert 3 <= fleet.driver.num_failed <= 6
    assert "the disk is full" in store.fleet.pools()[0].failure
