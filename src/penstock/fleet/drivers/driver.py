"""The protocol of drivers: start, stop and list replicas in one place. A driver knows nothing of demand.

Every call is idempotent by replica id, so that a controller that takes over may repeat what its predecessor began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from penstock.core.settings import Settings
from penstock.fleet.policy.observation import CapacityType


@dataclass(frozen=True)
class ReplicaSpec:
    id: str
    pool: str
    settings: Settings  # of the replica's engine and server; a driver sets the address
    zone: str = ""
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    gpus: int = 0


@dataclass(frozen=True)
class DriverReplica:
    """A replica that a driver has, whoever asked for it."""

    id: str
    pool: str
    url: str = ""  # empty: it has no address yet
    zone: str = ""
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    failure: str = ""  # it has ended, or cannot be started, and why
    deadline_s: float | None = None  # an interruption notice: seconds until it is taken away
    is_refused: bool = False  # `failure` is that no capacity of this kind was found for it
    is_ready: bool = True  # by its own probe, where the driver has it probed


class ReplicaNote(NamedTuple):
    """Facts of a replica that the controller knows and a driver may show."""

    state: str
    tokens_held: int = 0  # in its KV cache: work that would have to be done again elsewhere


class Driver(Protocol):
    async def start(self, spec: ReplicaSpec) -> None:
        """Begins to start a replica, and returns when that is sure to go on. Raises CapacityRefused or why not."""

    async def stop(self, replica_id: str, grace_s: float) -> None:
        """Ends a replica: it has `grace_s` for what it still does. One that is gone is no error."""

    async def list(self) -> Sequence[DriverReplica]:
        """Everything there is. A replica that has ended is listed with its failure until it is stopped."""

    async def close(self) -> None:
        """The controller goes; the replicas stay, unless the driver was told otherwise."""


@runtime_checkable
class NotingDriver(Protocol):
    """A driver that shows the controller's view where operators and the orchestrator look."""

    def note(self, notes: Mapping[str, ReplicaNote]) -> None:
        """All replicas, by id, after each round. It neither waits nor raises."""
