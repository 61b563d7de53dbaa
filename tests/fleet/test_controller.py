"""The controller over a real store and a driver that is a fake: replicas in memory, ready after so many rounds."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.errors import ConfigError, LeaseLost, PoolTaken
from penstock.fleet.drivers.driver import DriverReplica
from penstock.fleet.policy.observation import CapacityType
from penstock.fleet.rounds import read_rounds
from penstock.fleet.settings import FleetSettings
from penstock.tenancy.fleet import PoolDemand
from penstock.tenancy.lease import LeaseKeeper
from penstock.tenancy.store import Store
from tests.fleet.fake_fleet import Crash, FakeFleet, leading

NUM_CRASHES = 40


async def test_pool_has_its_minimum_and_gateways_are_told_of_what_is_ready(store: Store) -> None:
    fleet = FakeFleet(store)
    fleet.driver.is_ready = False
    controller = await leading(fleet)
    await fleet.run(controller, 3)
    assert fleet.states() == {"starting": 2}
    assert fleet.members() == {}
    assert store.fleet.pools()[0].reason.startswith("the pool has at least 2")
    fleet.driver.is_ready = True
    await fleet.run(controller, 3)
    assert fleet.states() == {"active": 2}
    assert sorted(fleet.members()) == sorted(one.url for one in fleet.driver.replicas.values())
    assert not any(fleet.members().values())


async def test_replica_that_is_lost_is_replaced(store: Store) -> None:
    fleet = FakeFleet(store)
    controller = await leading(fleet)
    await fleet.run(controller, 4)
    lost = next(iter(fleet.driver.replicas))
    one = fleet.driver.replicas[lost]
    fleet.driver.lose(lost)
    await fleet.run(controller, 8)
    assert lost not in fleet.driver.replicas
    assert fleet.states() == {"active": 2}
    assert one.url not in fleet.members()


@pytest.mark.parametrize("calls", range(NUM_CRASHES))
async def test_controller_killed_at_any_call_leaves_nothing_twice_and_nothing_orphaned(
    store: Store, calls: int
) -> None:
    fleet = FakeFleet(store)
    first = fleet.controller()
    fleet.driver.calls_left = calls
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # of tasks that die with their process
    try:
        assert await first.try_lead()
        for _ in range(4):
            await fleet.run(first, 1)
            if any(task.done() and isinstance(task.exception(), Crash) for task in first._commands.running.values()):
                break
    except Crash:
        pass
    for task in first._commands.running.values():
        task.cancel()
    fleet.driver.calls_left = -1
    second = await leading(fleet)
    await fleet.run(second, 8)
    assert fleet.states() == {"active": 2}
    assert {row.id for row in store.fleet.replicas()} == set(fleet.driver.replicas)
    assert max(fleet.driver.started.values()) == 1
    assert set(fleet.members()) == {one.url for one in fleet.driver.replicas.values()}


async def test_of_two_controllers_one_acts_and_the_other_takes_over_when_it_goes(store: Store) -> None:
    fleet = FakeFleet(store)
    first, second = fleet.controller(is_alone=False), fleet.controller(is_alone=False)
    assert await first.try_lead()
    assert not await second.try_lead()
    await fleet.run(first, 4)
    first._keeper.release()
    assert await second.try_lead()
    await fleet.run(second, 4)
    assert len(fleet.driver.replicas) == 2
    with pytest.raises(LeaseLost):
        await first.step()


async def test_paused_leader_that_was_replaced_begins_nothing(store: Store) -> None:
    fleet = FakeFleet(store)
    old = await leading(fleet)
    new = await leading(fleet)
    with pytest.raises(LeaseLost):
        await old.step()
    assert not fleet.driver.replicas
    await fleet.run(new, 4)
    assert fleet.states() == {"active": 2}


async def test_replica_that_no_row_names_is_stopped(store: Store) -> None:
    fleet = FakeFleet(store)
    fleet.driver.replicas["left-over"] = DriverReplica("left-over", "m", "http://127.0.0.1:9")
    controller = await leading(fleet)
    await fleet.run(controller, 4)
    assert "left-over" not in fleet.driver.replicas


@pytest.mark.parametrize("fault", ["fails", "lies"])
async def test_driver_that_fails_or_lies_is_asked_ever_less_often(store: Store, fault: str) -> None:
    fleet = FakeFleet(store, min=1, start_timeout_s=5.0)
    fleet.driver.fails, fleet.driver.is_ready = fault == "fails", False
    controller = await leading(fleet)
    tries = []
    for _ in range(300):
        await fleet.run(controller, 1)
        tries.append(len({row.id for row in store.fleet.replicas()} | set(fleet.driver.started)))
    assert len(fleet.driver.started) <= 9
    assert fleet.states().total() <= 1
    fleet.driver.fails, fleet.driver.is_ready = False, True
    await fleet.run(controller, 310)
    assert fleet.states() == {"active": 1}


async def test_refused_spot_capacity_is_replaced_by_on_demand(store: Store) -> None:
    fleet = FakeFleet(store, min=1, spot={"share": 1.0, "price_per_hour": 0.5}, price_per_hour=1.0)
    fleet.driver.refuses = CapacityType.SPOT
    controller = await leading(fleet)
    await fleet.run(controller, 10)
    assert [one.capacity_type for one in fleet.driver.replicas.values()] == [CapacityType.ON_DEMAND]
    assert {row.id for row in store.fleet.replicas()} == set(fleet.driver.replicas)


async def test_pool_that_the_file_no_longer_names_is_drained(store: Store) -> None:
    fleet = FakeFleet(store)
    await fleet.run(await leading(fleet), 4)
    url = next(iter(fleet.driver.replicas.values())).url
    fleet.client.num_open[url] = 1
    fleet.settings = FleetSettings()
    controller = await leading(fleet)
    await fleet.run(controller, 8)
    assert [one.url for one in fleet.driver.replicas.values()] == [url]
    assert fleet.members() == {url: True}
    fleet.client.num_open[url] = 0
    await fleet.run(controller, 4)
    assert not fleet.driver.replicas
    assert not fleet.members()


async def test_demand_of_gateways_reaches_the_status_and_the_history(store: Store) -> None:
    fleet = FakeFleet(store)
    controller = fleet.controller()
    store.fleet._clock = lambda: fleet.now
    assert await controller.try_lead()
    for second in range(70):
        store.fleet.write_demand([PoolDemand("g", "m", fleet.now, arrivals=second, finished=second)])
        await fleet.run(controller, 1)
    assert store.fleet.history("m")[-1].arrivals_per_s == pytest.approx(1.0, rel=0.1)
    (status,) = store.fleet.pools()
    assert status.states == {"active": 2}
    assert store.fleet.decisions("m")


async def test_rounds_of_decisions_and_of_every_minute_are_kept_and_can_be_decided_again(store: Store) -> None:
    fleet = FakeFleet(store, min=1, scale_on={"waiting": 2})
    controller = fleet.controller()
    store.fleet._clock = lambda: fleet.now
    assert await controller.try_lead()
    for second in range(150):
        waiting = 5 if second == 90 else 0
        counted = {"arrivals": second, "refused": second // 10, "finished": second}
        store.fleet.write_demand([PoolDemand("g", "m", fleet.now, waiting=waiting, **counted)])
        await fleet.run(controller, 1)
    rounds = read_rounds(store.fleet.rounds("m"))
    assert [each.decision.at - 1_000_000 for each in rounds if not each.decision.actions] == [60.0, 120.0]
    kept = {one.at for one in store.fleet.decisions("m")}
    assert kept == {each.decision.at for each in rounds if each.decision.reason}
    assert [each.policy().decide(each.observation, each.memory, each.decision.at)[0] for each in rounds] == [
        each.decision for each in rounds
    ]
    sample = store.fleet.history("m")[-1]
    assert (sample.arrivals, sample.refused) == (60, 6)


async def test_fleet_spends_no_more_than_it_may(store: Store) -> None:
    fleet = FakeFleet(store, min=4, price_per_hour=2.0)
    fleet.settings = FleetSettings(spend_per_hour=5.0, pools=fleet.settings.pools)
    controller = await leading(fleet)
    await fleet.run(controller, 60)
    assert len(fleet.driver.replicas) == 2
    (status,) = store.fleet.pools()
    assert (status.bound, status.start_failures) == ("spend", 0)


async def test_two_fleets_of_one_store_leave_each_other_alone(store: Store) -> None:
    one, other = FakeFleet(store), FakeFleet(store)
    other.settings = FleetSettings(name="other", pools={"n": {"min": 1}})
    await one.run(await leading(one), 4)
    await other.run(await leading(other), 4)
    await one.run(await leading(one), 4)
    assert (len(one.driver.replicas), len(other.driver.replicas)) == (2, 1)
    assert {status.pool for status in store.fleet.pools()} == {"m", "n"}


async def test_second_fleet_with_a_pool_of_the_same_name_is_refused_until_the_first_is_stopped(store: Store) -> None:
    one, other = FakeFleet(store), FakeFleet(store)
    other.settings = FleetSettings(name="other", pools={"n": {"min": 1}, "m": {"min": 1}})
    first = await leading(one)
    await one.run(first, 4)
    with pytest.raises(PoolTaken, match="the fleet 'penstock' of this store has a pool 'm'"):
        await other.controller().run()
    assert {status.pool: status.fleet for status in store.fleet.pools()} == {"m": "penstock"}
    await one.run(first, 2)
    assert set(one.members()) == {replica.url for replica in one.driver.replicas.values()}
    await first.stop_all(0.0)
    await other.run(await leading(other), 4)
    assert {status.pool: status.fleet for status in store.fleet.pools()} == {"m": "other", "n": "other"}


async def test_fleet_whose_controller_still_runs_is_not_taken_down(store: Store) -> None:
    fleet = FakeFleet(store)
    await fleet.run(await leading(fleet), 4)
    with pytest.raises(ConfigError, match="end it first"):
        await fleet.controller(is_alone=False).stop_all(0.0, patience_s=0.0)
    assert fleet.states() == {"active": 2}


async def test_fleet_whose_replicas_take_longer_to_stop_than_the_lease_lasts_is_taken_down(store: Store) -> None:
    fleet, lease_s = FakeFleet(store), 10.0
    await fleet.run(await leading(fleet), 4)
    now_s, stop = [0.0], fleet.driver.stop

    async def stop_slowly(replica_id: str, grace_s: float) -> None:
        now_s[0] += 2 * lease_s
        await stop(replica_id, grace_s)

    fleet.driver.stop = stop_slowly  # type: ignore[method-assign]
    keeper = LeaseKeeper(store.fleet, "penstock", "down", lease_s, lambda: now_s[0], is_alone=True)
    await fleet.controller(keeper=keeper).stop_all(0.0)
    assert not fleet.driver.replicas
    assert not store.fleet.replicas()
    assert not store.fleet.pools()


async def test_pool_whose_replicas_cannot_be_parked_loses_none_by_trying(store: Store) -> None:
    fleet = FakeFleet(store, min=1, parked=1)
    fleet.client.can_park = False
    controller = await leading(fleet)
    await fleet.run(controller, 60)
    assert fleet.states() == {"active": 1, "standby": 1}  # it was started before anybody knew
    await fleet.run(controller, 400)
    assert fleet.states() == {"active": 1}
    assert len(fleet.driver.started) == 2
