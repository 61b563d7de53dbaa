"""The Kubernetes driver's contract on the fake API server, and what only a fake can be made to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import CapacityRefused, OrchestratorError
from tests.fake_kubernetes import FakeKubernetes, fake_kubernetes, write_kubeconfig
from tests.fleet.drivers.kubernetes_contract import *  # noqa: F403
from tests.fleet.drivers.kubernetes_contract import driving, spec, until


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
