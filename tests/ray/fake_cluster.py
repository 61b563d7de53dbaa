"""A Ray cluster that is a fake: nodes, groups and actors in memory. It keeps the contract of a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from penstock import __version__
from penstock.core.errors import OrchestratorError
from penstock.fleet.drivers.ray_cluster import ActorView, ClusterView, EngineOrder, GroupView, NodeReport, NodeView


@dataclass
class _Group:
    bundles: Sequence[Mapping[str, float]]
    nodes: list[str] = field(default_factory=list)
    actor: ActorView = field(default_factory=ActorView)


@dataclass
class FakeRayCluster:
    resources: dict[str, dict[str, float]] = field(default_factory=dict)  # by node
    draining: dict[str, float] = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)
    orders: list[tuple[str, EngineOrder]] = field(default_factory=list)
    graces_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    reports: dict[str, NodeReport] = field(default_factory=dict)  # of nodes that are not as they should be
    probed: list[tuple[list[str], Mapping[str, Any]]] = field(default_factory=list)
    is_down: bool = False

    # -- RayCluster

    async def create_group(self, name: str, bundles: Sequence[Mapping[str, float]], wait_s: float) -> bool:
        self._check()
        group = self.groups.setdefault(name, _Group([dict(bundle) for bundle in bundles]))
        self._place()
        return bool(group.nodes)

    async def remove_group(self, name: str) -> None:
        self._check()
        self.groups.pop(name, None)
        self._place()

    async def start_engine(self, name: str, bundles: Sequence[Mapping[str, float]], order: EngineOrder) -> None:
        self._check()
        group = self.groups.get(name)
        if group is None:
            raise OrchestratorError(f"there is no placement group {name}")
        if not group.actor.is_begun:
            self.orders.append((name, order))
            group.actor = ActorView(is_begun=True, url=f"http://{group.nodes[0]}:{len(self.orders)}")

    async def stop_engine(self, name: str, grace_s: float) -> None:
        self._check()
        self.graces_s.append(grace_s)
        if name in self.groups:
            self.end_actor(name, "it was told to")

    async def view(self, prefix: str) -> ClusterView:
        self._check()
        found = [GroupView(name, one.nodes, one.actor) for name, one in self.groups.items() if name.startswith(prefix)]
        return ClusterView(found, dict(self.draining))

    async def nodes(self) -> list[NodeView]:
        self._check()
        living = [
            NodeView(name, name, dict(resources), drains_at=self.draining.get(name))
            for name, resources in self.resources.items()
        ]
        return [*living, *(NodeView(name, name, is_alive=False, death="it was lost") for name in self.lost)]

    async def probe(
        self,
        nodes: Sequence[str],
        runtime_env: Mapping[str, Any],
        paths: Sequence[str],
        store: Sequence[tuple[str, int]],
        wait_s: float,
    ) -> list[NodeReport]:
        self._check()
        self.probed.append(([*nodes], runtime_env))
        good = NodeReport(
            "", python="3.12.1", ray="2.60.0", penstock=__version__, has_torch=True, missing=_missing(paths)
        )
        gone = NodeReport("", "its node is gone")
        return [replace(self.reports.get(one, good if one in self.resources else gone), node=one) for one in nodes]

    async def close(self) -> None: ...

    # -- what tests do to it

    async def add_node(self, resources: Mapping[str, float]) -> str:
        node = f"node-{len(self.resources) + len(self.lost)}"
        self.resources[node] = dict(resources)
        return node

    async def lose_node(self, node: str) -> None:
        del self.resources[node]
        self.lost.append(node)
        self.draining.pop(node, None)
        for name, group in self.groups.items():
            if node in group.nodes:
                where = f"node {group.nodes.index(node)}: " if len(group.bundles) > 1 else ""
                group.nodes = []
                self.end_actor(name, f"{where}its node is gone")

    async def drain_node(self, node: str, at: float) -> None:
        self.draining[node] = at

    async def kill_engine(self, name: str) -> None:
        self.end_actor(name, "its process ended with status -9")

    async def kill_actor(self, name: str) -> None:
        self.end_actor(name, "its actor is dead")

    def end_actor(self, name: str, why: str) -> None:
        group = self.groups[name]
        if group.actor.is_begun and not group.actor.failure:
            group.actor = replace(group.actor, failure=why)

    # -- inside

    def _check(self) -> None:
        if self.is_down:
            raise OrchestratorError("Ray did not answer within 20 s")

    def _place(self) -> None:
        for group in self.groups.values():
            if not group.nodes:
                group.nodes = self._rooms(group.bundles)

    def _rooms(self, bundles: Sequence[Mapping[str, float]]) -> list[str]:
        """A node for each bundle; none, if there are not as many."""
        found: list[str] = []
        for bundle in bundles:
            usable = (node for node in self.resources if node not in self.draining and node not in found)
            if (room := next((node for node in usable if self._fits(node, bundle)), None)) is None:
                return []
            found.append(room)
        return found

    def _fits(self, node: str, bundle: Mapping[str, float]) -> bool:
        groups = self.groups.values()
        taken = [one for group in groups for at, one in zip(group.nodes, group.bundles, strict=False) if at == node]
        return all(
            sum(one.get(key, 0.0) for one in taken) + value <= self.resources[node].get(key, 0.0)
            for key, value in bundle.items()
        )


def _missing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not Path(path).exists()]
