"""`penstock doctor` of a Kubernetes cluster, against the fake API server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.cli.config_file import read_config_file
from penstock.cli.main import main
from penstock.cli.store_flags import store_url
from penstock.doctor.checks import look_over
from penstock.doctor.cluster import clock
from penstock.doctor.findings import Finding
from tests.fake_kubernetes import FakeKubernetes, fake_kubernetes, write_kubeconfig
from tests.server.replica import serving

PODS = "/api/v1/namespaces/models/pods"
READY = {"conditions": [{"type": "Ready", "status": "True"}]}
ZONE = "topology.kubernetes.io/zone"


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as found:
        monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
        write_kubeconfig(tmp_path / "kubeconfig", found.url, "models")
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        found.documents["/version"] = {"gitVersion": "v1.34.2"}
        found.documents["/apis"] = {"groups": [{"name": "metrics.k8s.io"}, {"name": "keda.sh"}]}
        yield found


async def create(
    server: FakeKubernetes, path: str, name: str, labels: dict[str, str] | None = None, **more: Any
) -> None:
    async with aiohttp.ClientSession() as session:
        body = {"metadata": {"name": name, "labels": labels or {}}, **more}
        async with session.post(f"{server.url}{path}", json=body) as answer:
            assert answer.status == 201


def pod(port: int = 9, image: str = "penstock:1") -> dict[str, Any]:
    """Spec and status of a pod that is ready and serves at a port of this machine."""
    spec = {"containers": [{"name": "main", "image": image, "ports": [{"name": "http", "containerPort": port}]}]}
    return {"spec": spec, "status": READY | {"podIP": "127.0.0.1"}}


async def complete(server: FakeKubernetes) -> None:
    """What a fleet needs besides its pods."""
    node = {"status": READY | {"allocatable": {"nvidia.com/gpu": "8"}}}
    await create(server, "/api/v1/nodes", "node-1", {ZONE: "a"}, **node)
    await create(server, "/api/v1/namespaces/models/secrets", "penstock-replicas", data={"gateway-secret": "aHVzaA=="})


async def found(tmp_path: Path, settings: dict[str, Any]) -> dict[str, list[Finding]]:
    config = tmp_path / "config.yaml"
    kubernetes = settings.get("kubernetes", {}) | {"kubeconfig": str(tmp_path / "kubeconfig")}
    store = f"sqlite:///{tmp_path / 'store.db'}"
    config.write_text(json.dumps(settings | {"store": store, "kubernetes": kubernetes}))

    def look() -> list[Finding]:
        return list(look_over(None, partial(read_config_file, config), None, store_url(None, None)))

    by_name: dict[str, list[Finding]] = {}
    for finding in await asyncio.to_thread(look):
        by_name.setdefault(finding.name, []).append(finding)
    return by_name


def verdicts(findings: dict[str, list[Finding]], *names: str) -> dict[str, list[str]]:
    return {name: [one.verdict for one in findings.get(name, [])] for name in names}


def fleet(**pool: Any) -> dict[str, Any]:
    return {"driver": "kubernetes", "kubernetes": {"image": "penstock:1"}, "pools": {"small": {"max": 2, **pool}}}


async def test_a_cluster_that_has_all_a_fleet_needs_has_nothing_to_fix(server: FakeKubernetes, tmp_path: Path) -> None:
    await complete(server)
    labels = {"app.kubernetes.io/managed-by": "penstock", "app.kubernetes.io/component": "replica"}
    chart = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/component": "gateway"}
    with serving() as replica:
        await create(server, PODS, "r-1", labels | {"penstock.dev/fleet": "penstock"}, **pod(replica.port))
        await create(server, PODS, "g-1", chart, **pod())
        ended = pod(image="penstock:0") | {"status": {"phase": "Succeeded"}}  # `helm test`
        await create(server, PODS, "t-1", chart | {"app.kubernetes.io/component": "test"}, **ended)
        findings = await found(tmp_path, fleet(gpus=1))
    ours = findings.keys() - {"python", "open files", "disk"}
    assert ours >= {"kubernetes", "clock", "rights", "metrics", "nodes", "zones", "gpus", "secret", "store", "versions"}
    assert {one.verdict for name in ours for one in findings[name]} == {"ok"}
    assert "v1.34.2; namespace models" in findings["kubernetes"][0].says
    assert [one.says.partition(":")[0] for one in findings["rights"]] == ["the driver", "the lease", "notices of nodes"]
    assert findings["gpus"][0].says == "8 of nvidia.com/gpu"
    assert "ready, penstock" in findings["replica"][0].says
    assert {one.says for one in findings["pods"]} == {"gateway: 1 of 1 pods are ready"}


async def test_what_is_missing_is_told_with_what_to_do(server: FakeKubernetes, tmp_path: Path) -> None:
    server.documents["/apis"] = {"groups": []}
    server.denied = {"create pods", "update leases", "watch nodes"}
    await create(server, "/api/v1/nodes", "node-1", status=READY)
    chart = {"app.kubernetes.io/name": "penstock"}
    await create(server, PODS, "g-1", chart, **pod())
    await create(server, PODS, "g-2", chart, **(pod(image="penstock:2") | {"status": {}}))
    findings = await found(tmp_path, fleet(gpus=1))
    names = ("rights", "metrics", "zones", "gpus", "secret", "pods", "versions", "replica")
    assert verdicts(findings, *names) == {
        "rights": ["fail", "fail", "warn"],
        "metrics": ["warn"],
        "zones": ["warn"],
        "gpus": ["fail"],
        "secret": ["fail"],
        "pods": ["warn"],
        "versions": ["warn"],
        "replica": ["warn"],
    }
    assert "may not create pods in models" in findings["rights"][0].says
    assert "may not update leases in models" in findings["rights"][1].says
    assert all(one.hint for every in findings.values() for one in every if one.verdict == "fail")


async def test_advisory_pools_need_somebody_who_scales_them(server: FakeKubernetes, tmp_path: Path) -> None:
    await complete(server)
    advisory = fleet(advisory=True, kubernetes={"selector": "app=small"})
    assert verdicts(await found(tmp_path, advisory), "metrics") == {"metrics": ["ok", "ok"]}
    server.documents["/apis"] = {"groups": [{"name": "metrics.k8s.io"}]}
    server.denied = {"create pods"}  # which is not needed then
    assert verdicts(await found(tmp_path, advisory), "metrics", "rights") == {
        "metrics": ["ok", "fail"],
        "rights": ["ok", "ok"],
    }


async def test_a_gateways_discovery_is_looked_at(server: FakeKubernetes, tmp_path: Path) -> None:
    await complete(server)
    models = {"small": {"kubernetes": [{"selector": "app=small"}]}, "big": {"kubernetes": [{"selector": "app=big"}]}}
    with serving() as replica, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens there
        await create(server, PODS, "small-1", {"app": "small"}, **pod(replica.port))
        await create(server, PODS, "small-2", {"app": "small"}, **(pod(replica.port) | {"status": {}}))
        await create(server, PODS, "small-3", {"app": "small"}, **pod(taken.getsockname()[1]))
        findings = await found(tmp_path, {"port": 0, "models": models})
    ready, unready, unreachable, none = findings["replica"]
    assert "ready, penstock" in ready.says
    assert "small-2 (small) is not ready" in unready.says
    assert "cannot be reached" in unreachable.says
    assert "no pod has app=big" in none.says
    assert [one.verdict for one in findings["replica"]] == ["ok", "warn", "warn", "warn"]
    assert [one.says for one in findings["rights"]] == ["discovery: list, watch pods in models"]


async def test_a_cluster_that_cannot_be_reached_is_one_line(server: FakeKubernetes, tmp_path: Path) -> None:
    server.go_down()
    findings = await found(tmp_path, fleet())
    assert verdicts(findings, "kubernetes", "rights", "nodes") == {"kubernetes": ["fail"], "rights": [], "nodes": []}
    server.come_up()
    server.forbidden = {"nodes", "secrets"}
    findings = await found(tmp_path, fleet())
    assert verdicts(findings, "kubernetes", "nodes", "secret") == {
        "kubernetes": ["ok"],
        "nodes": ["warn"],
        "secret": ["warn"],
    }


def test_clocks_that_differ_are_told() -> None:
    assert clock(-60.0, took_s=1.0).verdict == clock(60.0, took_s=1.0).verdict == "warn"
    assert clock(1.0, took_s=0.0).verdict == "ok"
    assert clock(-60.0, took_s=60.0).verdict == "ok"  # the answer was on its way so long


async def test_the_command_looks_at_a_cluster_without_a_file(
    server: FakeKubernetes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.denied = {"delete pods"}
    there = ["--kubeconfig", str(tmp_path / "kubeconfig"), "--namespace", "other"]
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(main, ["doctor", "--kubernetes", *there, "--json"])
    assert ended.value.code == 1
    said = {one["name"]: one for one in json.loads(capsys.readouterr().out) if one["verdict"] == "fail"}
    assert "may not delete pods in other" in said["rights"]["says"]
