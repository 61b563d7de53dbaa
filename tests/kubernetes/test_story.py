"""The chart on a real control plane with real penstock processes: a working day of a fleet, and streams all the while.

The tests of this file share one release, and each leaves two active replicas, one in each zone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tools.kubernetes.api import Object

from tests.kubernetes.namespaces import address, until
from tests.kubernetes.releases import REPLICA, Release

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.asyncio(loop_scope="module")]

NUM_CLIENTS = 2
ZONES = ["east", "west"]


def quiet_pool(release: Release, **settings: object) -> Object:
    """Two replicas, however busy the machine is."""
    return release.pool(min=2, max=4, zones=ZONES, scale_on={"active_sequences": 1000}, **settings)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(release: Release) -> AsyncIterator[Release]:
    await release.install(quiet_pool(release))
    await release.settled(2)
    yield release


async def test_chart_serves_from_both_zones(fleet: Release) -> None:
    async with fleet.clients(NUM_CLIENTS):
        assert {one.zone for one in (await fleet.active()).values()} == set(ZONES)
    pods = await fleet.ns.pods(**REPLICA)
    urls = {f"http://{address(pod)}:8000" for pod in pods.values()}
    assert {one.url for one in (await fleet.active()).values()} == urls


async def test_drained_node_loses_no_stream(fleet: Release) -> None:
    """`kubectl drain`: cordon, then evict."""
    lost = min((await fleet.active()).values(), key=lambda one: one.id)
    pod = await fleet.pod_of(lost.id)
    node, name = pod["spec"]["nodeName"], pod["metadata"]["name"]
    async with fleet.clients(NUM_CLIENTS):
        await fleet.ns.api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
        eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}}
        await fleet.ns.api.create(f"{fleet.ns.path('Pod', name)}/eviction", eviction)
        await fleet.ns.wait_until_gone("Pod", name)
        found = await fleet.settled(2)
        assert lost.id not in found
        assert node not in [(await fleet.pod_of(one))["spec"]["nodeName"] for one in found]
    await fleet.ns.api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None}})


async def test_notice_of_a_spot_node_replaces_first_and_then_drains(fleet: Release) -> None:
    """A taint of a node termination handler, which evicts nothing by itself."""
    lost = min((await fleet.active()).values(), key=lambda one: one.id)
    node = (await fleet.pod_of(lost.id))["spec"]["nodeName"]
    taint = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
    async with fleet.clients(NUM_CLIENTS):
        await fleet.ns.api.patch(f"/api/v1/nodes/{node}", {"spec": {"taints": [taint]}})
        await until(fleet.replicas, lambda found: lost.id not in found)
        found = await fleet.settled(2)
        assert node not in [(await fleet.pod_of(one))["spec"]["nodeName"] for one in found]
    await fleet.ns.api.patch(f"/api/v1/nodes/{node}", {"spec": {"taints": None}})


async def test_load_beyond_the_threshold_starts_replicas_and_silence_stops_them(fleet: Release) -> None:
    busy = fleet.pool(
        min=2, max=3, zones=ZONES, scale_on={"active_sequences": 1}, down_cooldown_s=5.0, drain_timeout_s=60.0
    )
    await fleet.install(busy)
    async with fleet.clients(6):
        await until(fleet.active, lambda found: len(found) == 3)
    await fleet.install(quiet_pool(fleet, down_cooldown_s=5.0))
    await fleet.settled(2)


async def test_pool_falls_to_zero_and_is_back_with_the_next_request(fleet: Release) -> None:
    idle = fleet.pool(min=0, max=2, zones=ZONES, idle_s=5.0, down_cooldown_s=1.0)
    await fleet.install(idle)
    await until(fleet.replicas, lambda found: not found)
    await until(lambda: fleet.ns.pods(**REPLICA), lambda found: not found)
    async with fleet.clients(1):  # its first request is held until there is a replica
        pass
    await fleet.install(quiet_pool(fleet))
    await fleet.settled(2)
