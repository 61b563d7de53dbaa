"""The lease's contract, in the store and as a Lease of Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.core.errors import LeaseLost
from penstock.fleet.kubernetes_lease import KubernetesLeaseKeeper
from penstock.http.kubernetes_api import ClusterSettings, KubernetesApi
from penstock.tenancy.lease import LeaseKeeper
from penstock.tenancy.store import Store
from tests.fake_kubernetes import FakeKubernetes, fake_kubernetes, write_kubeconfig
from tests.fleet.lease_contract import *  # noqa: F403
from tests.fleet.lease_contract import LEASE_S, Clock, Leases, take, write

PATH = "/apis/coordination.k8s.io/v1/namespaces/default/leases/penstock-fleet"


@pytest.fixture
async def server() -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as found:
        yield found


@pytest.fixture
async def kubernetes_leases(server: FakeKubernetes, store: Store, tmp_path: Path) -> AsyncIterator[Leases]:
    config = write_kubeconfig(tmp_path / "kubeconfig", server.url)
    apis: list[KubernetesApi] = []

    def make(holder: str, clock: Callable[[], float]) -> LeaseKeeper:
        apis.append(KubernetesApi(ClusterSettings(str(config))))
        return KubernetesLeaseKeeper(apis[-1], "penstock-fleet", store.fleet, "fleet", holder, LEASE_S, clock)

    yield make
    for api in apis:
        await api.close()


@pytest.fixture(params=["store", "kubernetes"])
def leases(request: pytest.FixtureRequest, store: Store) -> Leases:
    if request.param == "kubernetes":
        found: Leases = request.getfixturevalue("kubernetes_leases")
        return found
    return lambda holder, clock: LeaseKeeper(store.fleet, "fleet", holder, LEASE_S, clock)


async def test_a_leader_goes_on_while_the_server_is_away_and_nobody_replaces_it(
    server: FakeKubernetes, kubernetes_leases: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    mine, yours = Clock(), Clock()
    first, second = kubernetes_leases("first", mine), kubernetes_leases("second", yours)
    assert await take(first)
    assert not await take(second)
    server.go_down()
    for _ in range(4):
        mine.now += LEASE_S / 2
        yours.now += LEASE_S / 2
        await asyncio.to_thread(write, first)
        assert not await take(second)
    assert caplog.text.count("the Lease cannot be reached") == 2  # each has told it once
    server.come_up()
    assert not await take(second)  # the time in which it could not look does not count
    mine.now += LEASE_S / 2
    await asyncio.to_thread(write, first)
    assert not await take(second)
    yours.now += LEASE_S
    assert await take(second)
    with pytest.raises(LeaseLost):
        await asyncio.to_thread(write, first)


async def test_a_leader_that_alone_cannot_reach_the_server_is_replaced(
    server: FakeKubernetes, kubernetes_leases: Leases
) -> None:
    mine, yours = Clock(), Clock()
    first, second = kubernetes_leases("first", mine), kubernetes_leases("second", yours)
    assert await take(first)
    assert not await take(second)
    yours.now += LEASE_S  # the first has renewed nothing meanwhile, and its own clock has not moved
    assert await take(second)
    server.go_down()
    with pytest.raises(LeaseLost):  # the store knows
        await asyncio.to_thread(write, first)
    await asyncio.to_thread(write, second)


async def test_a_lease_that_an_operator_has_touched_is_renewed(
    server: FakeKubernetes, kubernetes_leases: Leases, tmp_path: Path
) -> None:
    clock = Clock()
    first = kubernetes_leases("first", clock)
    assert await take(first)
    api = KubernetesApi(ClusterSettings(str(tmp_path / "kubeconfig")))
    await api.merge(PATH, {"metadata": {"labels": {"seen": "true"}}})
    clock.now += LEASE_S / 2
    await asyncio.to_thread(write, first)
    clock.now += LEASE_S / 2
    assert first.is_held
    lease = await api.request("GET", PATH)
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("first", 1)
    await api.merge(PATH, {"spec": {"holderIdentity": "somebody"}})
    with pytest.raises(LeaseLost):
        await asyncio.to_thread(write, first)
    await api.close()
