"""The calls of Ray that the driver makes, as a protocol: placement groups, an actor for each of their nodes, and a view
of both.

`ray_process.RayProcess` makes them for real; tests have a fake that keeps the same contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec


class EngineOrder(msgspec.Struct, frozen=True):
    """The engine that an actor is to start."""

    config: str  # settings of the replica, as JSON
    secret: str
    runtime_env: Mapping[str, Any] = {}  # as Ray has it


class ActorView(msgspec.Struct, frozen=True):
    is_begun: bool = False  # it was told to start its engine
    url: str = ""
    failure: str = ""  # its engine has ended, or it has itself, and why


class GroupView(msgspec.Struct, frozen=True):
    """A placement group and what is in it: one actor, or one on each of its nodes, seen as one."""

    name: str
    nodes: Sequence[str] = ()  # the first node's first; empty: it waits for room
    actor: ActorView = ActorView()


def as_one(actors: Sequence[ActorView]) -> ActorView:
    """The actors of a group: they have begun when all have, and the first that fails is the failure of all."""
    if len(actors) == 1:
        return actors[0]
    failure = next((f"node {node}: {one.failure}" for node, one in enumerate(actors) if one.failure), "")
    return ActorView(bool(failure) or all(one.is_begun for one in actors), actors[0].url, failure)


class ClusterView(msgspec.Struct, frozen=True):
    groups: Sequence[GroupView]
    draining: Mapping[str, float]  # by node: seconds since 1970 at which it goes; 0: nobody said when


class NodeView(msgspec.Struct, frozen=True):
    id: str
    host: str
    resources: Mapping[str, float] = {}  # all that it has, in use or not
    is_alive: bool = True
    drains_at: float | None = None  # seconds since 1970 at which it goes; 0: nobody said when
    death: str = ""  # why it is not alive
    is_expected_death: bool = False  # somebody took it away

    @property
    def is_usable(self) -> bool:
        return self.is_alive and self.drains_at is None

    @property
    def shown(self) -> str:
        return f"{self.host} ({self.id[:8]})"


class NodeReport(msgspec.Struct, frozen=True):
    """Answers of an actor on one node."""

    node: str
    failure: str = ""  # no actor could be asked there, and why: then nothing else is known
    python: str = ""
    ray: str = ""
    penstock: str = ""  # its version; empty: it cannot be imported
    problem: str = ""  # why not
    has_torch: bool = False
    missing: Sequence[str] = ()  # of the paths that were asked for
    store_failure: str = ""  # why the store cannot be reached from there
    skew_s: float = 0.0  # of its clock, beside that of the process that asked
    skew_error_s: float = 0.0  # by how much that may be wrong


class RayCluster(Protocol):
    """Every call raises OrchestratorError where Ray refuses or does not answer. A group and its first actor have the
    same name."""

    async def create_group(self, name: str, bundles: Sequence[Mapping[str, float]], wait_s: float) -> bool:
        """Reserves each bundle on a node of its own, unless that was done before. False: there was no room for so
        long."""

    async def remove_group(self, name: str) -> None:
        """Frees the resources, and kills the actors that have them. One that is gone is no error."""

    async def start_engine(self, name: str, bundles: Sequence[Mapping[str, float]], order: EngineOrder) -> None:
        """Creates the actors in their group unless they are there, and returns when they have begun to start the
        engine: of several nodes, each knows its number and where the first is."""

    async def stop_engine(self, name: str, grace_s: float) -> None:
        """Returns when the engine has ended, on all of its nodes. One that is gone is no error."""

    async def view(self, prefix: str) -> ClusterView:
        """The groups whose names begin so."""

    async def nodes(self) -> Sequence[NodeView]:
        """All nodes that Ray remembers, those that have ended too."""

    async def probe(
        self,
        nodes: Sequence[str],
        runtime_env: Mapping[str, Any],
        paths: Sequence[str],
        store: Sequence[tuple[str, int]],
        wait_s: float,
    ) -> Sequence[NodeReport]:
        """Asks an actor on each of these nodes, in a runtime environment, for versions, its clock, whether `paths` are
        there, and whether one of the store's places takes connections."""

    async def close(self) -> None: ...
