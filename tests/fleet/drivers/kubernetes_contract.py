"""The contract of the Kubernetes driver on any API server: tests to be imported where a fixture `cluster` is one.

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
from penstock.fleet.drivers.driver import DriverReplica, ReplicaNote
from penstock.fleet.drivers.kubernetes import KubernetesDriver
from penstock.fleet.drivers.kubernetes_pod import pod_name
from penstock.fleet.drivers.kubernetes_settings import KubernetesSettings
from penstock.fleet.policy.observation import CapacityType
from penstock.fleet.settings import FleetSettings
from penstock.http.kubernetes_api import ClusterSettings, KubernetesApi, Object
from tests.fleet.drivers.contract import *  # noqa: F403
from tests.fleet.drivers.contract import spec
from tests.waiting import eventually_awaited

COST = "controller.kubernetes.io/pod-deletion-cost"


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
async def driving(cluster: Cluster, *, pool: Object | None = None, **settings: Any) -> AsyncIterator[KubernetesDriver]:
    """`pool`: settings of the pool `pool`; the others are of its pods."""
    own = KubernetesSettings(
        kubeconfig=str(cluster.kubeconfig), namespace=cluster.namespace, image="penstock:test", **settings
    )
    fleet = FleetSettings(name="fleet", driver="kubernetes", kubernetes=own, pools={"pool": pool or {}})
    driver = KubernetesDriver(fleet, KubernetesApi(own))
    try:
        yield driver
    finally:
        await driver.close()


@pytest.fixture
async def driver(cluster: Cluster) -> AsyncIterator[KubernetesDriver]:
    async with driving(cluster) as found:
        yield found


async def until(driver: KubernetesDriver, is_so: Callable[[list[DriverReplica]], object]) -> list[DriverReplica]:
    """The driver's listing when it has replicas and this holds for them first."""
    return await eventually_awaited(lambda: listing(driver), lambda listed: listed and is_so(listed))


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


async def test_a_driver_that_begins_anew_finds_its_replicas(cluster: Cluster, driver: KubernetesDriver) -> None:
    await driver.start(spec("Pool/X@2-abc", "west", CapacityType.SPOT))
    async with driving(cluster) as other:
        (found,) = await other.list()
        await other.start(spec("Pool/X@2-abc"))
        assert len(await other.list()) == 1
    assert (found.id, found.zone, found.capacity_type) == ("Pool/X@2-abc", "west", CapacityType.SPOT)


async def test_a_pod_that_ends_or_cannot_start_is_listed_with_its_failure(
    driver: KubernetesDriver, kubelet: Kubelet
) -> None:
    await kubelet.add_node("contract-b")
    for replica in ("pool-1", "pool-2", "pool-3"):
        await driver.start(spec(replica))
        await kubelet.run(replica, "contract-b")
    ended = {"name": "penstock", "state": {"terminated": {"exitCode": 3, "reason": "Error", "message": "no memory"}}}
    waiting = {"name": "penstock", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    usual = {"image": "i", "imageID": "", "lastState": {}, "ready": False, "restartCount": 0}
    await kubelet.report("pool-1", phase="Failed", containerStatuses=[ended | usual])
    await kubelet.report("pool-2", phase="Pending", containerStatuses=[waiting | usual])
    await kubelet.report("pool-3", phase="Failed", reason="Evicted", message="the node was low on memory")
    found = await until(driver, lambda listed: len([one for one in listed if one.failure]) == 3)
    assert [one.failure for one in found] == [
        "its pod has ended: no memory: exit code 3",
        "its pod cannot start: ImagePullBackOff: no such image",
        "its pod has ended: Evicted: the node was low on memory",
    ]
    await driver.stop("pool-1", 0.0)  # nothing is left to be waited for
    assert [one.id for one in await driver.list()] == ["pool-2", "pool-3"]


async def test_a_pod_that_no_node_takes_is_refused_after_a_while(cluster: Cluster, kubelet: Kubelet) -> None:
    async with driving(cluster, unschedulable_s=1e-9, node_selector={"penstock.dev/none": "such"}) as driver:
        await driver.start(spec("pool-1"))
        unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
        await kubelet.report("pool-1", conditions=[unplaced])
        (found,) = await until(driver, lambda listed: listed[0].failure)
        assert found.is_refused
        assert found.failure.startswith("no node takes its pod: ")


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        ({"taints": [{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]}, 120.0),
        ({"taints": [{"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"}]}, 15.0),
        ({"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}, 600.0),
        ({"unschedulable": True}, 600.0),
    ],
)
async def test_a_node_that_will_go_is_a_notice(
    driver: KubernetesDriver, kubelet: Kubelet, change: Object, seconds: float
) -> None:
    await kubelet.add_node("contract-c")
    await kubelet.add_node("contract-d")
    for replica, node in (("pool-1", "contract-c"), ("pool-2", "contract-d")):
        await driver.start(spec(replica))
        await kubelet.run(replica, node)
    await until(driver, lambda listed: all(one.url for one in listed))
    # A scheduler may have placed them otherwise: the node that counts is where the first one is.
    node = (await kubelet.get("pool-1"))["spec"]["nodeName"]
    is_apart = (await kubelet.get("pool-2"))["spec"]["nodeName"] != node
    await kubelet.change_node(node, change)
    found = await until(driver, lambda listed: listed[0].deadline_s is not None)
    assert 0.0 < (found[0].deadline_s or 0.0) <= seconds
    assert (found[1].deadline_s is None) == is_apart
    await kubelet.change_node(node, {"taints": None, "unschedulable": None})
    await until(driver, lambda listed: listed[0].deadline_s is None)


async def test_an_eviction_is_a_notice(driver: KubernetesDriver, kubelet: Kubelet) -> None:
    await kubelet.add_node("contract-e")
    await driver.start(spec("pool-1"))
    await kubelet.run("pool-1", "contract-e")
    await until(driver, lambda listed: listed[0].url)
    await kubelet.api.request("DELETE", f"{kubelet.pods}/pool-1")  # by somebody else, with the pod's own grace
    (found,) = await until(driver, lambda listed: listed[0].deadline_s is not None)
    assert 0.0 < (found.deadline_s or 0.0) <= 45.0
    assert not found.failure


async def test_preemption_is_a_notice(driver: KubernetesDriver, kubelet: Kubelet) -> None:
    await kubelet.add_node("contract-f")
    await driver.start(spec("pool-1"))
    await kubelet.run("pool-1", "contract-f")
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    await kubelet.report("pool-1", conditions=[target])
    await until(driver, lambda listed: listed[0].deadline_s is not None)


async def test_pods_on_a_lost_node_are_removed_without_its_word(
    cluster: Cluster, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.fleet.drivers.kubernetes._CONFIRM_S", 0.1)
    async with driving(cluster, pre_stop_s=0) as driver:
        await kubelet.add_node("contract-g")
        await driver.start(spec("pool-1"))
        await kubelet.run("pool-1", "contract-g")
        await until(driver, lambda listed: listed[0].url)
        taint = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
        node = (await kubelet.get("pool-1"))["spec"]["nodeName"]
        await kubelet.change_node(node, {"taints": [taint]})
        await until(driver, lambda listed: listed[0].deadline_s is not None)
        await driver.stop("pool-1", 0.0)
        assert await driver.list() == []


async def test_a_watch_that_breaks_or_expires_is_taken_up_again(
    cluster: Cluster, driver: KubernetesDriver, kubelet: Kubelet
) -> None:
    drop, forget = needs(cluster, "drop_watches"), needs(cluster, "forget_history")
    await driver.start(spec("pool-1"))
    await until(driver, bool)
    for number in (2, 3):
        async with driving(cluster) as other:
            await other.start(spec(f"pool-{number}"))
            await kubelet.remove(f"pool-{number - 1}")
        if number == 3:
            forget()
        drop()
        await until(driver, lambda listed, number=number: [one.id for one in listed] == [f"pool-{number}"])


async def test_a_listing_that_may_be_old_is_an_error(cluster: Cluster, driver: KubernetesDriver) -> None:
    go_down, come_up = needs(cluster, "go_down"), needs(cluster, "come_up")
    await driver.start(spec("pool-1"))
    assert len(await driver.list()) == 1
    go_down()

    async def fails() -> str:
        try:
            await driver.list()
        except OrchestratorError as error:
            return error.reason or ""
        return ""

    assert await eventually_awaited(fails) == "Unreachable"
    with pytest.raises(OrchestratorError, match="cannot be reached"):
        await driver.start(spec("pool-2"))
    come_up()
    assert [one.id for one in await until(driver, bool)] == ["pool-1"]
    await driver.start(spec("pool-2"))
    assert len(await driver.list()) == 2


async def test_a_replicas_state_is_a_label(driver: KubernetesDriver, kubelet: Kubelet) -> None:
    await driver.start(spec("pool-1"))
    assert (await kubelet.get("pool-1"))["metadata"]["labels"]["penstock.dev/state"] == "starting"
    await driver.list()

    async def label() -> str:
        driver.note({"pool-1": ReplicaNote("active", 1000), "gone": ReplicaNote("active")})
        return str((await kubelet.get("pool-1"))["metadata"]["labels"]["penstock.dev/state"])

    assert await eventually_awaited(label, lambda found: found == "active")
    assert COST not in (await kubelet.get("pool-1"))["metadata"]["annotations"]  # nobody but the controller ends it


async def test_pods_of_an_advisory_pool_are_listed_and_told_what_they_hold(cluster: Cluster, kubelet: Kubelet) -> None:
    await kubelet.add_node("contract-h", **{"topology.kubernetes.io/zone": "west"})
    container = {"name": "c", "image": "vllm", "ports": [{"containerPort": 8000}]}
    for name, labels in (("vllm-1", {"app": "vllm"}), ("other-1", {"app": "other"})):
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}}
        await kubelet.api.request("POST", kubelet.pods, body=manifest | {"spec": {"containers": [container]}})
    async with driving(cluster, pool={"advisory": True, "kubernetes": {"selector": "app=vllm"}}) as driver:
        (found,) = await until(driver, bool)
        assert (found.id, found.pool, found.is_ready) == ("vllm-1", "pool", False)
        await kubelet.run("vllm-1", "contract-h", "127.0.1.9")
        (found,) = await until(driver, lambda listed: listed[0].is_ready and listed[0].zone)
        assert (found.url, found.zone) == ("http://127.0.1.9:8000", "west")

        async def cost() -> str:
            driver.note({"vllm-1": ReplicaNote("active", 5000)})
            return str(((await kubelet.get("vllm-1"))["metadata"].get("annotations") or {}).get(COST))

        assert await eventually_awaited(cost, lambda found: found == "4096")
