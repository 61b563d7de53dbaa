"""The chart, installed on the test cluster: gateways, controllers and replicas, all real processes, and clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from tools.drills.fleet_load import CheckedLoad
from tools.helm import CHART
from tools.kubernetes.api import Object
from tools.kubernetes.cluster import Cluster

from penstock.fleet.drivers.kubernetes_pod import merge
from penstock.fleet.policy.decision import Decision
from penstock.tenancy.fleet import FleetReplica
from penstock.tenancy.store import Store
from tests.kubernetes.namespaces import Namespace, address, until

POOL = "tiny"
PORT = 8000
TOKENS = 120  # of an answer
GATEWAY = {"app.kubernetes.io/component": "gateway"}
CONTROLLER = {"app.kubernetes.io/component": "fleet"}
REPLICA = {"app.kubernetes.io/component": "replica"}
SECRET = "gateways-and-replicas-share-this-1"
_VERSION = "1.20.2"
_numbers = itertools.count(1)


def values(store_url: str, pools: list[Object], edge_nodes: dict[str, str], models: Object) -> Object:
    """Values of the chart for a test: small and quick. `models`: of the gateway's file."""
    small = {"requests": {"cpu": "10m", "memory": "64Mi"}}
    return {
        "store": {"kind": "postgresql"},
        "limiter": {"kind": "perGateway"},
        "secret": {"create": True, "storeUrl": store_url, "gatewaySecret": SECRET},
        "gateway": {
            "replicas": 2,
            "autoscaling": {"enabled": False},
            "preStopSeconds": 1,
            "nodeSelector": edge_nodes,
            "resources": small,
            "config": {"allow_anonymous": True, "models": models},
        },
        "fleet": {
            "replicas": 2,
            "nodeSelector": edge_nodes,
            "resources": small,
            "config": {
                "every_s": 0.2,
                "lease_s": 3.0,
                "kubernetes": {"node_drain_s": 60, "unschedulable_s": 5},
            },
        },
        "pools": pools,
    }


def pool(model: Path, name: str = POOL, **settings: Any) -> Object:
    """`model`: a directory in `models` of a penstock home, which is the nodes' cache."""
    engine = {"load": "dummy", "dtype": "float32", "threads": 1}
    fixed: dict[str, Any] = {"standby": 0, "parked": 0, "predict": False, "hold_s": 240.0, "up_cooldown_s": 1.0}
    own = {"model": f"/var/cache/penstock/models/{model.name}", "engine": engine, **fixed, **settings}
    return {
        "name": name,
        "settings": own,
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "cache": {"kind": "hostPath", "path": str(model.parent.parent)},
        "preStopSeconds": 1,
    }


@dataclass
class Release:
    cluster: Cluster
    ns: Namespace
    store: Store
    model: Path
    store_url: str

    async def install(
        self,
        *pools: Object,
        edge_nodes: Mapping[str, str] | None = None,
        models: Object | None = None,
        more: Object | None = None,
    ) -> None:
        """Installs the chart, or upgrades it. `edge_nodes`: labels of nodes for gateways and controllers; `more`:
        values that go before these."""
        wanted = values(self.store_url, list(pools), dict(edge_nodes or {}), models or {})
        self._values.write_text(json.dumps(merge(wanted, more or {})))  # which is YAML too
        rendered = await self._render("--no-hooks")
        apply = ("apply", "--validate=false", "-f", "-", "--namespace", self.ns.name)
        await asyncio.to_thread(lambda: self.cluster.kubectl(*apply, stdin=rendered))

    async def run_test(self, gateway: str, model: str) -> tuple[str, str]:
        """Runs the pod of `helm test` for a model, at this gateway's address, since no Service has endpoints here.
        Returns its phase, and what it printed."""
        pod = yaml.safe_load(await self._render("--show-only", "templates/tests/answer.yaml"))
        arguments = pod["spec"]["containers"][0]["args"]
        at = arguments.index("--url") + 1
        arguments[at] = f"{arguments[at].partition(':')[0]}://{gateway}:{PORT}"
        arguments.insert(1, model)
        pod["metadata"]["name"] += f"-{next(_numbers)}"
        made = await self.ns.api.create(self.ns.path("Pod"), pod)
        name = made["metadata"]["name"]

        async def ended() -> Object | None:
            found = await self.ns.get("Pod", name)
            return found if found is not None and found["status"]["phase"] in ("Succeeded", "Failed") else None

        found = await until(ended)
        assert found is not None
        node = self.cluster.nodes[found["spec"]["nodeName"]]
        (log,) = (text for path, text in node.logs() if f"_{name}_" in path)
        return found["status"]["phase"], log

    async def _render(self, *words: str) -> str:
        """The chart's manifests with the values that it was installed with last."""
        given = ("--kube-version", _VERSION, "--values", str(self._values), "--namespace", self.ns.name)
        return await asyncio.to_thread(self.cluster.helm, "template", "penstock", str(CHART), *given, *words)

    @property
    def _values(self) -> Path:
        return Path(self.cluster.nodes["east-1"].settings.directory) / f"{self.ns.name}-values.yaml"

    async def gateways(self) -> dict[str, str]:
        """Addresses of gateways that are ready, by pod."""
        return {name: address(one) for name, one in (await self.ns.ready(**GATEWAY)).items()}

    async def settled(self, num_active: int, num_gateways: int = 2) -> dict[str, FleetReplica]:
        """Waits until so many replicas are active, no other is on its way, and their gateways are ready."""
        await until(self.gateways, lambda found: len(found) == num_gateways)
        wanted = ["active"] * num_active
        return await until(self.replicas, lambda found: [one.state for one in found.values()] == wanted)

    async def replicas(self) -> dict[str, FleetReplica]:
        """Replicas by id, as the store has them."""
        return {one.id: one for one in await asyncio.to_thread(lambda: [*self.store.fleet.replicas()])}

    async def active(self) -> dict[str, FleetReplica]:
        return {name: one for name, one in (await self.replicas()).items() if one.state == "active"}

    async def pod_of(self, replica: str) -> Object:
        found = await self.ns.pods(**REPLICA)
        return next(one for one in found.values() if one["metadata"]["annotations"]["penstock.dev/replica"] == replica)

    def pool(self, name: str = POOL, **settings: Any) -> Object:
        return pool(self.model, name, **settings)

    async def kill(self, pod: Object) -> None:
        """Kills all processes of the pod, at once, without a word to anybody."""
        node = self.cluster.nodes[pod["spec"]["nodeName"]]
        await asyncio.to_thread(node.kill_pod, pod["metadata"]["uid"])

    def decisions(self, name: str = POOL) -> list[Decision]:
        found = self.store.fleet.decisions(name, limit=20_000)
        return [msgspec.json.decode(row.document, type=Decision) for row in reversed(found)]

    @contextlib.asynccontextmanager
    async def clients(self, number: int) -> AsyncIterator[CheckedLoad]:
        """Clients that ask all the while, through one gateway. None of their answers breaks or differs from one that
        was given in quiet."""
        gateway = sorted((await until(self.gateways)).values())[0]
        load = CheckedLoad(PORT, TOKENS, host=gateway)
        await load.learn()
        load.resize(number)
        try:
            await self.answers(load, number)
            yield load
            await self.answers(load, number)
        finally:
            await load.stop()
        assert load.tally.wrong == []

    async def answers(self, load: CheckedLoad, number: int) -> None:
        """Waits until so many more answers have come, whole."""
        wanted = load.tally.num_whole + number

        async def num_whole() -> int:
            return load.tally.num_whole

        await until(num_whole, lambda found: found >= wanted)
