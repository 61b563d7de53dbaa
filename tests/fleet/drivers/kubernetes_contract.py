"""What the Kubernetes driver must do on any API server: tests to be imported where a fixture `cluster` is one.

A cluster (`Cluster`) offers a kubeconfig and a namespace of its own that is empty. Nothing but an API server need run:
`Kubelet` below does by requests what a scheduler and a node's agent would do, and a scheduler that runs is no harm. A
server that can be taken away also has `go_down` and `come_up`; one that can drop watches and forget its history has
`drop_watches` and `forget_history`. A test that needs what a cluster does not have is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from penstock.core.errors import OrchestratorError
from penstock.core.settings import EngineSettings, ServerSettings, Settings
from penstock.core.slo import Slo
from penstock.fleet.drivers.driver import DriverReplica, ReplicaSpec
from penstock.fleet.drivers.kubernetes import KubernetesDriver
from penstock.fleet.drivers.kubernetes_pod import pod_name
from penstock.fleet.drivers.kubernetes_settings import KubernetesSettings
from penstock.fleet.policy.observation import CapacityType
from penstock.fleet.settings import FleetSettings
from penstock.http.kubernetes_api import ClusterSettings, KubernetesApi, Object
from tests.waiting import eventually_awaited


class Cluster(Protocol):
    kubeconfig: Path
    namespace: str


@dataclass
class Kubelet:
    """Requests of a scheduler and of a node's agent."""

    api: KubernetesApi
    nodes: list[str] = field(default_factory=list)

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.api.namespace}/pods"

    async def add_node(self, name: str, **labels: str) -> None:
        manifest = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        await self.api.request("POST", "/api/v1/nodes", body=manifest)
        self.nodes.append(name)
        room = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "8"}
        conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
        status = {"capacity": room, "allocatable": room, "conditions": conditions}
        await self.api.merge(f"/api/v1/nodes/{name}/status", {"status": status})

    async def change_node(self, name: str, spec: Object) -> None:
        await self.api.merge(f"/api/v1/nodes/{name}", {"spec": spec})

    async def bind(self, replica: str, node: str) -> None:
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod_name(replica)}}
        with contextlib.suppress(OrchestratorError):  # a scheduler was faster
            await self.api.request(
                "POST",
                f"{self.pods}/{pod_name(replica)}/binding",
                body=binding | {"target": {"apiVersion": "v1", "kind": "Node", "name": node}},
            )

    async def report(self, replica: str, **status: Any) -> None:
        await self.api.merge(f"{self.pods}/{pod_name(replica)}/status", {"status": status})

    async def run(self, replica: str, node: str, ip: str = "127.0.1.1") -> None:
        """The pod runs and is ready."""
        await self.bind(replica, node)
        conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]
        await self.report(replica, phase="Running", podIP=ip, podIPs=[{"ip": ip}], conditions=conditions)

    async def get(self, replica: str) -> Object:
        return await self.api.request("GET", f"{self.pods}/{pod_name(replica)}")

    async def remove(self, replica: str) -> None:
        """The process has ended: the pod is removed."""
        await self.api.request("DELETE", f"{self.pods}/{pod_name(replica)}", body={"gracePeriodSeconds": 0})

    async def close(self) -> None:
        for name in self.nodes:
            with contextlib.suppress(OrchestratorError):
                await self.api.request("DELETE", f"/api/v1/nodes/{name}")
        await self.api.close()


@pytest.fixture
async def kubelet(cluster: Cluster) -> AsyncIterator[Kubelet]:
    api = KubernetesApi(ClusterSettings(str(cluster.kubeconfig), namespace=cluster.namespace))
    await api.connect()
    found = Kubelet(api)
    yield found
    await found.close()


@contextlib.asynccontextmanager
async def driving(cluster: Cluster, **settings: Any) -> AsyncIterator[KubernetesDriver]:
    own = KubernetesSettings(
        kubeconfig=str(cluster.kubeconfig), namespace=cluster.namespace, image="penstock:test", **settings
    )
    fleet = FleetSettings(name="fleet", driver="kubernetes", kubernetes=own, pools={"pool": {}})
    driver = KubernetesDriver(fleet, KubernetesApi(own))
    try:
        yield driver
    finally:
        await driver.close()


@pytest.fixture
async def driver(cluster: Cluster) -> AsyncIterator[KubernetesDriver]:
    async with driving(cluster) as found:
        yield found


def spec(replica: str, zone: str = "", capacity_type: CapacityType = CapacityType.ON_DEMAND) -> ReplicaSpec:
    settings = Settings("smollm2", EngineSettings(), ServerSettings(name="pool"), Slo())
    return ReplicaSpec(replica, "pool", settings, zone=zone, capacity_type=capacity_type)


async def until(driver: KubernetesDriver, is_so: Callable[[list[DriverReplica]], object]) -> list[DriverReplica]:
    """The driver's listing when this holds for it first."""
    return await eventually_awaited(lambda: listing(driver), is_so)


async def listing(driver: KubernetesDriver) -> list[DriverReplica]:
    """Nothing where the driver cannot tell."""
    with contextlib.suppress(OrchestratorError):
        return [*await driver.list()]
    return []


def needs(cluster: Cluster, fault: str) -> Any:
    """The cluster's way to inject a fault."""
    if not hasattr(cluster, fault):
        pytest.skip(f"this cluster cannot {fault}")
    return getattr(cluster, fault)


async def test_a_replica_is_a_pod_from_start_to_stop(driver: KubernetesDriver, kubelet: Kubelet) -> None:
    await kubelet.add_node("contract-a")
    assert await driver.list() == []
    await driver.start(spec("pool-1"))
    (found,) = await driver.list()
    assert (found.id, found.pool, found.url, found.failure, found.deadline_s) == ("pool-1", "pool", "", "", None)
    await kubelet.run("pool-1", "contract-a")
    (found,) = await until(driver, lambda listed: listed[0].url)
    assert found.url == "http://127.0.1.1:8000"
    stopping = asyncio.create_task(driver.stop("pool-1", 30.0))
    await until(driver, lambda listed: listed[0].deadline_s is not None)
    pod = await kubelet.get("pool-1")
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 35  # preStop comes first
    assert not stopping.done()
    await kubelet.remove("pool-1")
    await stopping
    assert await driver.list() == []


async def test_starting_and_stopping_twice_is_the_same_as_once(driver: KubernetesDriver, kubelet: Kubelet) -> None:
    for _ in range(2):
        await driver.start(spec("pool-1"))
    assert [one.id for one in await driver.list()] == ["pool-1"]
    for _ in range(2):
        await driver.stop("pool-1", 30.0)
    await driver.stop("never-was", 0.0)
    assert await driver.list() == []


async def test_a_driver_that_begins_anew_finds_its_replicas(cluster: Cluster, driver: KubernetesDriver) -> None:
    await driver.start(spec("Pool/X@2-abc", "west", CapacityType.SPOT))
    async with driving(cluster) as other:
        (found,) = await other.list()
        await other.start(spec("Pool/X@2-abc"))
        assert len(await other.list()) == 1
    assert (found.id, found.zone, found.capacity_type) == ("Pool/X@2-abc", "west", CapacityType.SPOT)
