"""Replicas by pods: real requests to a fake API server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.core.errors import ConfigError
from penstock.gateway.membership.factory import ReplicaFactory
from penstock.gateway.membership.kubernetes import KubernetesSource, PodQuery
from penstock.gateway.membership.membership import Membership
from penstock.gateway.replicas.replica_set import ReplicaSet
from penstock.gateway.settings.gateway import ModelSettings
from penstock.http.kubernetes_api import ClusterSettings, KubernetesApi
from tests.clocks import ManualClock
from tests.fake_kubernetes import FakeKubernetes, fake_kubernetes, write_kubeconfig
from tests.waiting import eventually_async

PODS = "/api/v1/namespaces/default/pods"


class Stand(NamedTuple):
    server: FakeKubernetes
    api: KubernetesApi
    membership: Membership
    replicas: ReplicaSet

    async def add(self, name: str, ip: str, port: str = "http", **labels: str) -> None:
        """A pod that runs and is not ready."""
        container = {"name": "c", "ports": [{"name": "metrics", "containerPort": 9}]}
        container["ports"].append({"name": port, "containerPort": 8001})  # type: ignore[attr-defined]
        metadata = {"name": name, "labels": {"app": "m", **labels}}
        await self.api.request("POST", PODS, body={"metadata": metadata, "spec": {"containers": [container]}})
        await self.api.request("POST", f"{PODS}/{name}/binding", body={"target": {"name": "node"}})
        await self.patch(name, phase="Running", podIP=ip)

    async def patch(self, name: str, **status: Any) -> None:
        await self.api.merge(f"{PODS}/{name}/status", {"status": status})

    async def ready(self, name: str, *, is_ready: bool = True) -> None:
        await self.patch(name, conditions=[{"type": "Ready", "status": "True" if is_ready else "False"}])

    async def until(self, **draining: bool) -> None:
        """Waits until these are the replicas, each with whether it drains: a1=False is that of 10.0.0.1."""
        wanted = {f"http://10.0.0.{name[1:]}:8001": drains for name, drains in draining.items()}
        await eventually_async(
            lambda: {one.id: one.is_draining for one in self.replicas.values()}, lambda found: found == wanted
        )


@contextlib.asynccontextmanager
async def following(tmp_path: Path, *entries: dict[str, Any], **settings: Any) -> AsyncIterator[Stand]:
    async with fake_kubernetes() as server:
        cluster = ClusterSettings(str(write_kubeconfig(tmp_path / "kubeconfig", server.url)))
        replicas, api = ReplicaSet(), KubernetesApi(cluster)
        source = KubernetesSource(cluster)
        membership = Membership(replicas, ReplicaFactory(clock=ManualClock()))
        source.changed = membership.refresh
        membership.add_source(source)
        membership.configure({"m": ModelSettings(kubernetes=list(entries), **settings)})
        yield Stand(server, api, membership, replicas)
        await source.close()
        await api.close()


async def test_pods_are_replicas_while_they_are_ready_and_drain_after(tmp_path: Path) -> None:
    async with following(tmp_path, {"selector": "app=m"}) as stand:
        for number in (1, 2):
            await stand.add(f"p{number}", f"10.0.0.{number}")
        await stand.add("other", "10.0.0.9", app="x")
        await stand.ready("p1")
        await stand.until(a1=False)
        await stand.ready("p2")
        await stand.until(a1=False, a2=False)
        await stand.ready("p1", is_ready=False)
        await stand.until(a1=True, a2=False)
        await stand.ready("p1")
        await stand.until(a1=False, a2=False)
        await stand.api.request("DELETE", f"{PODS}/p2", body={"gracePeriodSeconds": 30})
        await stand.until(a1=False, a2=True)
        await stand.api.request("DELETE", f"{PODS}/p2", body={"gracePeriodSeconds": 0})
        await stand.until(a1=False)
        await stand.patch("p1", phase="Failed")
        await stand.until()


async def test_replicas_stay_while_the_server_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with following(tmp_path, {"selector": "app=m"}) as stand:
        await stand.add("p1", "10.0.0.1")
        await stand.ready("p1")
        await stand.until(a1=False)
        stand.server.go_down()
        num_before = len(stand.server.requests)
        await eventually_async(lambda: len(stand.server.requests) > num_before)
        await eventually_async(lambda: "stays as it was" in caplog.text)
        await stand.until(a1=False)
        stand.server.come_up()
        await stand.add("p2", "10.0.0.2")
        await stand.ready("p2")
        await stand.until(a1=False, a2=False)


async def test_pods_of_another_engine_have_their_port_dialect_and_zone(tmp_path: Path) -> None:
    entry = {"selector": "app=m", "port": "api", "dialect": "vllm"}
    async with following(tmp_path, entry) as stand:
        await stand.add("p1", "10.0.0.1", "api", **{"topology.kubernetes.io/zone": "eu-1a"})
        await stand.add("p2", "10.0.0.2", "another")
        await stand.ready("p2")
        await stand.ready("p1")
        await stand.until(a1=False)
        (replica,) = stand.replicas.values()
        assert (replica.dialect, replica.zone, replica.source) == ("vllm", "eu-1a", "kubernetes")


async def test_a_selector_that_is_no_longer_named_is_no_longer_followed(tmp_path: Path) -> None:
    async with following(tmp_path, {"selector": "app=m"}) as stand:
        await stand.add("p1", "10.0.0.1")
        await stand.ready("p1")
        await stand.until(a1=False)
        stand.membership.configure({"m": ModelSettings()})
        await stand.until()
        await eventually_async(lambda: not stand.server.num_watches)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({}, "label selector"),
        ({"selector": "a=b", "prot": 1}, "did you mean"),
        ({"selector": "a", "port": 1.5}, "port"),
    ],
)
def test_entries_that_name_no_pods_are_refused(entry: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PodQuery.parse(entry)
