"""The controller's client against replicas of each engine that can be parked: ours, and the fakes of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from penstock import __version__
from penstock.api.replica_report import ReplicaReport
from penstock.core.errors import Conflict, EngineUnavailable, UnsupportedTask
from penstock.fleet.drivers.driver import DriverReplica, ReplicaSpec
from penstock.fleet.replica_client import ReplicaClient
from penstock.fleet.settings import ReplicaTlsSettings
from penstock.http.server import Server, bound_socket
from penstock.http.tls import ServerTls
from penstock.tenancy.store import Store
from tests.certificates import new_ca
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


async def test_replicas_with_a_certificate_are_asked_by_the_name_in_it(tmp_path: Path) -> None:
    ca = new_ca(tmp_path)
    files = ca.issue("pods", good_for="DNS:replicas.serving.svc")
    theirs = ServerTls(str(files.cert), str(files.key))
    report = msgspec.json.encode(ReplicaReport("m", __version__, "ready"))
    server = Server(lambda exchange: exchange.respond(200, b"", report))
    listener = bound_socket("127.0.0.1", 0)
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    await server.listen(listener, tls=theirs)
    for tls, is_trusted in (
        (ReplicaTlsSettings(str(ca.cert), "replicas.serving.svc"), True),
        (ReplicaTlsSettings(str(ca.cert)), False),
        (ReplicaTlsSettings(None, "replicas.serving.svc"), False),
    ):
        with closing(ReplicaClient(None, SlowClock(), tls.context(), tls.server_name)) as client:
            assert (await client.report(url) is not None) == is_trusted
    await server.stop(0.0)


async def test_replica_takes_another_role(client: ReplicaClient) -> None:
    with serving() as replica:
        url = f"http://{replica.host}:{replica.port}"
        await client.set_role(url, "decode")
        report = await client.report(url)
        assert report is not None
        assert report.role == "decode"
    with FakeVllm() as fake, pytest.raises(EngineUnavailable, match="does not take the role prefill"):
        await client.set_role(fake.url, "prefill")
