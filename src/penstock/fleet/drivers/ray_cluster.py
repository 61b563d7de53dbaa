"""The calls of Ray that the driver makes, as a protocol: placement groups, one actor in each, and a view of both.

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
    """A placement group and the actor in it."""

    name: str
    node: str = ""  # empty: it waits for room
    actor: ActorView = ActorView()


class ClusterView(msgspec.Struct, frozen=True):
    groups: Sequence[GroupView]
    draining: Mapping[str, float]  # by node: seconds since 1970 at which it goes; 0: nobody said when


class RayCluster(Protocol):
    """Every call raises OrchestratorError where Ray refuses or does not answer. Group and actor have the same name."""

    async def create_group(self, name: str, bundle: Mapping[str, float], wait_s: float) -> bool:
        """Reserves resources on one node, unless that was done before. False: there was no room for so long."""

    async def remove_group(self, name: str) -> None:
        """Frees the resources, and kills the actor that has them. One that is gone is no error."""

    async def start_engine(self, name: str, bundle: Mapping[str, float], order: EngineOrder) -> None:
        """Creates the actor in its group unless it is there, and returns when it has begun to start its engine."""

    async def stop_engine(self, name: str, grace_s: float) -> None:
        """Returns when the engine has ended. One that is gone is no error."""

    async def view(self, prefix: str) -> ClusterView:
        """The groups whose names begin so."""

    async def close(self) -> None: ...
