"""A Ray cluster that is a fake: nodes, groups and actors in memory. It keeps the contract of a real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.core.errors import OrchestratorError
from penstock.fleet.drivers.ray_cluster import ActorView, ClusterView, EngineOrder, GroupView


@dataclass
class _Group:
    bundle: Mapping[str, float]
    node: str = ""
    actor: ActorView = field(default_factory=ActorView)


@dataclass
class FakeRayCluster:
    nodes: dict[str, dict[str, float]] = field(default_factory=dict)
    draining: dict[str, float] = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)
    orders: list[tuple[str, EngineOrder]] = field(default_factory=list)
    graces_s: list[float] = field(default_factory=list)
    is_down: bool = False

    # -- RayCluster

    async def create_group(self, name: str, bundle: Mapping[str, float], wait_s: float) -> bool:
        self._check()
        group = self.groups.setdefault(name, _Group(dict(bundle)))
        self._place()
        return bool(group.node)

    async def remove_group(self, name: str) -> None:
        self._check()
        self.groups.pop(name, None)
        self._place()

    async def start_engine(self, name: str, bundle: Mapping[str, float], order: EngineOrder) -> None:
        self._check()
        group = self.groups.get(name)
        if group is None:
            raise OrchestratorError(f"there is no placement group {name}")
        if not group.actor.is_begun:
            self.orders.append((name, order))
            group.actor = ActorView(is_begun=True, url=f"http://{group.node}:{len(self.orders)}")

    async def stop_engine(self, name: str, grace_s: float) -> None:
        self._check()
        self.graces_s.append(grace_s)
        if name in self.groups:
            self.end_actor(name, "it was told to")

    async def view(self, prefix: str) -> ClusterView:
        self._check()
        found = [GroupView(name, one.node, one.actor) for name, one in self.groups.items() if name.startswith(prefix)]
        return ClusterView(found, dict(self.draining))

    async def close(self) -> None: ...

    # -- what tests do to it

    async def add_node(self, resources: Mapping[str, float]) -> str:
        node = f"node-{len(self.nodes)}"
        self.nodes[node] = dict(resources)
        return node

    async def lose_node(self, node: str) -> None:
        del self.nodes[node]
        self.draining.pop(node, None)
        for name, group in self.groups.items():
            if group.node == node:
                group.node = ""
                self.end_actor(name, "its node is gone")

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
            if not group.node:
                rooms = (node for node in self.nodes if node not in self.draining and self._fits(node, group.bundle))
                group.node = next(rooms, "")

    def _fits(self, node: str, bundle: Mapping[str, float]) -> bool:
        taken = [one.bundle for one in self.groups.values() if one.node == node]
        return all(
            sum(one.get(key, 0.0) for one in taken) + value <= self.nodes[node].get(key, 0.0)
            for key, value in bundle.items()
        )
