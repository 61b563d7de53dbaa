"""The Kubernetes driver's contract on the fake API server, and what only a fake can be made to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import CapacityRefused, OrchestratorError
from penstock.core.settings import EngineSettings, Settings
from tests.fake_kubernetes import FakeKubernetes, fake_kubernetes, write_kubeconfig
from tests.fleet.drivers.kubernetes_contract import *  # noqa: F403
from tests.fleet.drivers.kubernetes_contract import driving, spec, until
from tests.waiting import eventually_async

PODS = "/api/v1/namespaces/models/pods"
GROUPS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/models/leaderworkersets"


class FakeCluster:
    def __init__(self, server: FakeKubernetes, kubeconfig: Path) -> None:
        self.server = server
        self.kubeconfig = kubeconfig
        self.namespace = "models"
        self.go_down, self.come_up = server.go_down, server.come_up
        self.drop_watches, self.forget_history = server.drop_watches, server.forget_history


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_kubernetes() as server:
        yield FakeCluster(server, write_kubeconfig(tmp_path / "kubeconfig", server.url, "models"))


async def test_a_server_that_has_too_many_requests_is_asked_again(cluster: FakeCluster, driver: Any) -> None:
    cluster.server.num_throttled = 3
    await driver.start(spec("pool-1"))
    assert cluster.server.requests.count("POST /api/v1/namespaces/models/pods") == 4
    cluster.server.num_throttled = 100
    with pytest.raises(OrchestratorError) as refused:
        await driver.start(spec("pool-2"))
    assert refused.value.reason == "TooManyRequests"


async def test_a_quota_is_capacity_that_is_refused(cluster: FakeCluster, driver: Any) -> None:
    cluster.server.quota = "requests.nvidia.com/gpu=8"
    with pytest.raises(CapacityRefused, match="exceeded quota"):
        await driver.start(spec("pool-1"))


async def test_a_driver_that_may_not_see_nodes_lists_its_pods(cluster: FakeCluster, driver: Any) -> None:
    cluster.server.forbidden.add("nodes")
    await driver.start(spec("pool-1"))
    assert [one.id for one in await driver.list()] == ["pool-1"]


async def test_a_manifest_that_kubernetes_refuses_is_a_failure(cluster: FakeCluster) -> None:
    async with driving(cluster, template={"spec": {"containers": None}}) as driver:
        with pytest.raises(OrchestratorError) as refused:
            await driver.start(spec("pool-1"))
    assert refused.value.reason == "Invalid"


async def test_a_stop_that_finds_the_server_away_fails_and_can_be_repeated(cluster: FakeCluster, driver: Any) -> None:
    await driver.start(spec("pool-1"))
    await driver.list()
    cluster.go_down()
    with pytest.raises(OrchestratorError):
        await driver.stop("pool-1", 5.0)
    cluster.come_up()
    await until(driver, bool)
    await driver.stop("pool-1", 5.0)
    assert await driver.list() == []


async def test_a_replica_over_two_nodes_is_there_from_its_start_to_the_end_of_its_pods(cluster: FakeCluster) -> None:
    engine = {"tp": 2}
    async with driving(cluster, pool={"engine": engine}, nodes=2) as driver:
        wanted = replace(spec("pool-1"), settings=Settings(engine=EngineSettings(tp=2)))
        await driver.start(wanted)
        await driver.start(wanted)  # one that is there already
        assert cluster.server.requests.count(f"POST {GROUPS}") == 2
        (found,) = await driver.list()
        assert (found.id, found.pool, found.url, found.is_ready) == ("pool-1", "pool", "", False)
        group = await driver._api.request("GET", f"{GROUPS}/pool-1")
        template = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        labels = template["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = template["metadata"] | {"name": "pool-1-0", "labels": labels}
        await driver._api.request("POST", PODS, body=pod)
        ready = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": "127.0.1.1", "conditions": ready}
        await driver._api.merge(f"{PODS}/pool-1-0/status", {"status": status})
        (found,) = await until(driver, lambda listed: listed[0].is_ready)
        assert found.url == "http://127.0.1.1:8000"
        stopping = asyncio.create_task(driver.stop("pool-1", 5.0))
        await eventually_async(lambda: f"DELETE {GROUPS}/pool-1" in cluster.server.requests)
        await driver._api.request("DELETE", f"{PODS}/pool-1-0", body={"gracePeriodSeconds": 0})  # as its owner does
        await stopping
        assert await driver.list() == []


async def test_a_group_that_has_no_pod_yet_can_be_stopped(cluster: FakeCluster) -> None:
    async with driving(cluster, pool={"engine": {"tp": 2}}, nodes=2) as driver:
        await driver.start(replace(spec("pool-1"), settings=Settings(engine=EngineSettings(tp=2))))
        await driver.stop("pool-1", 5.0)
        assert await driver.list() == []


async def test_a_notice_is_never_longer_than_its_sign_says(
    cluster: FakeCluster, driver: Any, kubelet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At this time of the clock 15 s later and back is a little more than 15 s."""
    now = 0.1
    while (now + 15.0) - now <= 15.0:
        now += 0.1
    monkeypatch.setattr(driver, "_clock", lambda: now)
    await kubelet.add_node("contract-n")
    await driver.start(spec("pool-1"))
    await kubelet.run("pool-1", "contract-n")
    await until(driver, lambda listed: listed[0].url)
    taint = {"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"}
    await kubelet.change_node("contract-n", {"taints": [taint]})
    (found,) = await until(driver, lambda listed: listed[0].deadline_s is not None)
    assert found.deadline_s == 15.0
