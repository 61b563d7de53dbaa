"""The controller's client against replicas of each engine that can be parked: ours, and the fakes of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.core.errors import Conflict, UnsupportedTask
from penstock.fleet.drivers.driver import DriverReplica, ReplicaSpec
from penstock.fleet.replica_client import ReplicaClient
from penstock.tenancy.store import Store
from tests.clocks import SlowClock
from tests.dialects.servers import FakeServer, FakeSglang, FakeTgi, FakeVllm
from tests.fleet.fake_fleet import FakeDriver, FakeFleet, leading
from tests.server.replica import serving

parkable = pytest.mark.parametrize("kind", [FakeVllm, FakeSglang], ids=lambda kind: kind.__name__)


@pytest.fixture
def client() -> Iterator[ReplicaClient]:
    with closing(ReplicaClient(None, SlowClock())) as found:
        yield found


@parkable
async def test_replica_of_another_engine_reports_its_load_and_is_parked_and_woken(
    client: ReplicaClient, kind: type[FakeServer]
) -> None:
    with kind() as fake:
        fake.running, fake.waiting = 1, 2
        report = await client.report(fake.url)
        assert report is not None
        assert (report.state, report.can_park, report.measured.load.num_open) == ("ready", True, 3)
        with pytest.raises(Conflict, match="3 requests are still open"):
            await client.park(fake.url)
        fake.running = fake.waiting = 0
        assert await client.makes_token(fake.url)
        await client.park(fake.url)
        assert fake.is_parked
        await client.wake(fake.url)
        assert not fake.is_parked


async def test_vllm_says_that_it_sleeps_and_whether_it_was_started_for_it(client: ReplicaClient) -> None:
    with FakeVllm() as fake:
        fake.is_parked = True
        report = await client.report(fake.url)
        assert report is not None
        assert report.state == "parked"
        assert not await client.makes_token(fake.url)
    with FakeVllm(can_park=False) as fake:
        report = await client.report(fake.url)
        assert report is not None
        assert not report.can_park
        with pytest.raises(UnsupportedTask, match="--enable-sleep-mode"):
            await client.park(fake.url)


async def test_engine_without_such_a_state_is_not_planned_to_be_parked(client: ReplicaClient) -> None:
    with FakeTgi() as fake:
        report = await client.report(fake.url)
        assert report is not None
        assert (report.state, report.can_park) == ("ready", False)


async def test_penstock_replica_is_parked_and_woken_by_the_same_calls(client: ReplicaClient) -> None:
    with serving() as replica:
        url = f"http://{replica.host}:{replica.port}"
        report = await client.report(url)
        assert report is not None
        assert report.boot
        assert await client.makes_token(url)
        await client.park(url)
        parked = await client.report(url)
        assert parked is not None
        assert parked.state == "parked"
        await client.wake(url)
        awake = await client.report(url)
        assert awake is not None
        assert awake.state == "ready"


async def test_one_that_is_gone_has_no_report(client: ReplicaClient) -> None:
    with FakeVllm() as fake:
        pass
    assert await client.report(fake.url) is None


@parkable
async def test_controller_parks_a_replica_of_another_engine_and_wakes_it(
    store: Store, client: ReplicaClient, kind: type[FakeServer]
) -> None:
    class Driver(FakeDriver):
        """One replica, of another engine."""

        async def start(self, spec: ReplicaSpec) -> None:
            self.replicas[spec.id] = DriverReplica(spec.id, spec.pool, fake.url)

    with kind() as fake:
        fleet = FakeFleet(store, min=0, max=1, parked=1)
        fleet.driver = Driver()
        fleet.client = client  # type: ignore[assignment]
        controller = await leading(fleet)

        async def until(state: str) -> None:
            for _ in range(20):
                await fleet.run(controller, 1, waits=True)
                if fleet.states() == {state: 1}:
                    return
            raise AssertionError(f"{fleet.states()}, not {state}")

        await until("parked")
        assert fake.is_parked
        fleet.settings.pools["m"].update(min=1, parked=0)
        controller = await leading(fleet)
        await until("active")
        assert not fake.is_parked
