"""Every part of a fleet on Kubernetes dies once, and streams go on: docs/kubernetes.md has a row for each test.

The tests of this file share one release, and each leaves two active replicas, one in each zone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tools.drills.fleet_load import CheckedLoad
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.postgres import Postgres

from tests.kubernetes.namespaces import until
from tests.kubernetes.releases import CONTROLLER, GATEWAY, REPLICA, Release

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.asyncio(loop_scope="module")]

NUM_CLIENTS = 2
ZONES = ["east", "west"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(release: Release) -> AsyncIterator[Release]:
    # Gateways and controllers are in the east: the loss of the west takes replicas alone.
    east = {"topology.kubernetes.io/zone": "east"}
    pool = release.pool(min=2, max=4, zones=ZONES, scale_on={"active_sequences": 1000})
    await release.install(pool, edge_nodes=east)
    await release.settled(2)
    yield release


async def answers_come(fleet: Release, load: CheckedLoad) -> None:
    """Requests that are made now are answered: more of them than are open."""
    await fleet.answers(load, 4 * NUM_CLIENTS)


@pytest.mark.parametrize("part", ["kube-apiserver", "etcd", "kube-scheduler", "kube-controller-manager"])
async def test_service_goes_on_without_a_part_of_the_control_plane(fleet: Release, cluster: Cluster, part: str) -> None:
    before = await fleet.settled(2)
    async with fleet.clients(NUM_CLIENTS) as load:
        with cluster.plane.without(part):
            await answers_come(fleet, load)
        await answers_come(fleet, load)
    assert await fleet.settled(2) == before  # nothing was lost, nothing started


async def test_replica_that_died_without_the_api_server_is_replaced_when_it_is_back(
    fleet: Release, cluster: Cluster
) -> None:
    lost = min(await fleet.settled(2))
    pod = await fleet.pod_of(lost)
    async with fleet.clients(NUM_CLIENTS) as load:
        with cluster.plane.without("kube-apiserver"):
            await fleet.kill(pod)
            await answers_come(fleet, load)
        await until(fleet.replicas, lambda found: lost not in found)
        await fleet.settled(2)


async def test_replica_whose_process_dies_is_replaced(fleet: Release) -> None:
    lost = min(await fleet.settled(2))
    async with fleet.clients(NUM_CLIENTS):
        await fleet.kill(await fleet.pod_of(lost))
        await until(fleet.replicas, lambda found: lost not in found)
        await fleet.settled(2)


async def test_another_controller_leads_where_one_dies(fleet: Release) -> None:
    before = await fleet.settled(2)
    async with fleet.clients(NUM_CLIENTS) as load:
        for pod in (await fleet.ns.ready(**CONTROLLER)).values():
            await fleet.kill(pod)
        await answers_come(fleet, load)
        await until(lambda: fleet.ns.ready(**CONTROLLER), lambda found: len(found) == 2)
        lost = min(before)
        await fleet.kill(await fleet.pod_of(lost))  # it is replaced: somebody leads
        await until(fleet.replicas, lambda found: lost not in found)
        found = await fleet.settled(2)
    assert found.keys() & before.keys() == before.keys() - {lost}


async def test_gateway_that_is_deleted_ends_its_streams_first(fleet: Release) -> None:
    """A rollout or a drain of a node: streams end by themselves, and new connections go to the other gateways."""
    gateways = await fleet.gateways()
    name = min(gateways, key=lambda one: gateways[one])  # the one that `clients` uses
    async with fleet.clients(NUM_CLIENTS) as load:
        load.resize(0)
        await fleet.ns.api.delete(fleet.ns.path("Pod", name))
        await fleet.ns.wait_until_gone("Pod", name)
        load.move(next(address for one, address in gateways.items() if one != name))
        load.resize(NUM_CLIENTS)
    await until(fleet.gateways, lambda found: len(found) == 2)


async def test_gateway_that_dies_takes_its_own_connections_only(fleet: Release) -> None:
    gateways = await until(fleet.gateways, lambda found: len(found) == 2)
    name = max(gateways, key=lambda one: gateways[one])  # not the one that `clients` uses
    pods = await fleet.ns.pods(**GATEWAY)
    async with fleet.clients(NUM_CLIENTS) as load:
        await fleet.kill(pods[name])
        await answers_come(fleet, load)
    await until(fleet.gateways, lambda found: len(found) == 2)


async def test_node_that_dies_loses_no_stream(fleet: Release, cluster: Cluster) -> None:
    lost = next(name for name, one in (await fleet.settled(2)).items() if one.zone == "west")
    node = (await fleet.pod_of(lost))["spec"]["nodeName"]
    async with fleet.clients(NUM_CLIENTS) as load:
        cluster.nodes[node].kill()
        await answers_come(fleet, load)
        await until(fleet.replicas, lambda found: lost not in found)
        found = await fleet.settled(2)
        assert node not in [(await fleet.pod_of(one))["spec"]["nodeName"] for one in found]
    cluster.nodes[node].start()
    await until(lambda: fleet.ns.pods(**REPLICA), lambda pods: len(pods) == 2)


async def test_zone_that_is_lost_is_replaced_in_the_other(fleet: Release, cluster: Cluster) -> None:
    before = await fleet.settled(2)
    west = [node for node in cluster.nodes.values() if node.settings.zone == "west"]
    async with fleet.clients(NUM_CLIENTS) as load:
        for node in west:
            node.kill()
        await answers_come(fleet, load)
        found = await until(fleet.active, lambda found: [one.zone for one in found.values()] == ["east", "east"])
        assert {name for name, one in before.items() if one.zone == "east"} <= found.keys()
    for node in west:
        node.start()


async def test_service_goes_on_without_the_store(fleet: Release, database: Postgres) -> None:
    await until(fleet.active, lambda found: len(found) == 2)
    async with fleet.clients(NUM_CLIENTS) as load:
        with database.stopped():
            await answers_come(fleet, load)
        await answers_come(fleet, load)
