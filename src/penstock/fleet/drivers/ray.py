"""Replicas on Ray: each is a detached actor in a placement group of its own, which starts the engine's process. A
replica over several nodes has an actor on each, and is started, listed, stopped and lost as one.

A placement group is a replica's record: its name says what the replica is, and it stays until the replica is stopped,
whatever becomes of the actor. So the next controller finds everything by names.

    penstock/FLEET/REPLICA?pool=smollm2&zone=a&capacity=spot
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from urllib.parse import parse_qs, quote, unquote, urlencode

import msgspec

from penstock.core.errors import CapacityRefused
from penstock.fleet.drivers.driver import DriverReplica, ReplicaSpec
from penstock.fleet.drivers.ray_bundles import Bundle, bundles_for, rank_map, told_nodes
from penstock.fleet.drivers.ray_cluster import EngineOrder, GroupView, RayCluster
from penstock.fleet.drivers.ray_fit import explain_lack, shown_all
from penstock.fleet.drivers.ray_settings import RaySettings
from penstock.fleet.policy.observation import CapacityType
from penstock.fleet.settings import FleetSettings

PREFIX = "penstock/"  # of the names of all fleets' placement groups
_UNFINISHED_S = 60.0  # a start that nobody goes on with for so long has failed
_UNKNOWN_DRAIN_S = 60.0  # where a node drains and nobody said until when


class RayDriver:
    """Belongs to the event loop."""

    def __init__(
        self,
        settings: FleetSettings,
        cluster: RayCluster,
        secret: str,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings.ray
        self._pools = settings.pool_settings()
        self._prefix = f"{PREFIX}{quote(settings.name, safe='')}/"
        self._cluster = cluster
        self._secret = secret
        self._clock = clock
        self._starting: set[str] = set()  # names of groups
        self._unfinished: dict[str, float] = {}  # groups whose actors have not begun, and since when that is known

    async def start(self, spec: ReplicaSpec) -> None:
        settings = self._settings_of(spec.pool)
        name, bundles = self._name(spec), await self._bundles(spec, settings)
        order = EngineOrder(_config(spec, bundles), self._secret, settings.runtime_env)
        self._starting.add(name)
        try:
            if not await self._cluster.create_group(name, bundles, settings.place_timeout_s):
                await self._cluster.remove_group(name)
                why = explain_lack(bundles, await self._cluster.nodes())
                raise CapacityRefused(f"Ray has no node with room for {shown_all(bundles)}: {why}")
            await self._cluster.start_engine(name, bundles, order)
        finally:
            self._starting.discard(name)

    async def stop(self, replica_id: str, grace_s: float) -> None:
        for group in (await self._cluster.view(self._own_prefix(replica_id))).groups:
            if group.actor.is_begun and not group.actor.failure:
                await self._cluster.stop_engine(group.name, grace_s)
            await self._cluster.remove_group(group.name)

    async def list(self) -> Sequence[DriverReplica]:
        view, now = await self._cluster.view(self._prefix), self._clock()
        idle = [group.name for group in view.groups if not group.actor.is_begun and group.name not in self._starting]
        self._unfinished = {name: self._unfinished.get(name, now) for name in idle}
        deadlines = {node: at - now if at else _UNKNOWN_DRAIN_S for node, at in view.draining.items()}
        return [
            self._replica(group, min((deadlines[node] for node in group.nodes if node in deadlines), default=None))
            for group in view.groups
            if now - self._unfinished.get(group.name, -_UNFINISHED_S) >= _UNFINISHED_S
        ]

    async def close(self) -> None:
        await self._cluster.close()

    async def _bundles(self, spec: ReplicaSpec, settings: RaySettings) -> Sequence[Bundle]:
        is_open = spec.gpus > 1 and told_nodes(spec.settings.engine, settings) is None
        return bundles_for(spec, settings, await self._cluster.nodes() if is_open else ())

    def _replica(self, group: GroupView, deadline_s: float | None) -> DriverReplica:
        named, _, described = group.name.removeprefix(self._prefix).partition("?")
        about = {key: values[0] for key, values in parse_qs(described).items()}
        return DriverReplica(
            unquote(named),
            about.get("pool", ""),
            group.actor.url,
            about.get("zone", ""),
            CapacityType(about.get("capacity", CapacityType.ON_DEMAND)),
            "its start was never finished" if group.name in self._unfinished else group.actor.failure,
            deadline_s if deadline_s is None else max(0.0, deadline_s),
        )

    def _settings_of(self, pool: str) -> RaySettings:
        found = self._pools.get(pool)
        return self._settings.of_pool(pool, found.ray) if found is not None else self._settings

    def _own_prefix(self, replica_id: str) -> str:
        return f"{self._prefix}{quote(replica_id, safe='')}?"

    def _name(self, spec: ReplicaSpec) -> str:
        about = {"pool": spec.pool, "zone": spec.zone, "capacity": spec.capacity_type}
        return self._own_prefix(spec.id) + urlencode({key: value for key, value in about.items() if value})


def fleet_of(name: str) -> str:
    """The fleet that a placement group belongs to, by its name."""
    return unquote(name.removeprefix(PREFIX).partition("/")[0])


def _config(spec: ReplicaSpec, bundles: Sequence[Bundle]) -> str:
    """Settings of the replica. Ranks on CPUs have as many threads as are reserved for them, unless the pool says how
    many."""
    engine, server = spec.settings.engine, replace(spec.settings.server, gateway_secret=None)
    if engine.threads is None and not spec.gpus:
        num_cpus, num_ranks = int(bundles[0].get("CPU", 0)), rank_map(engine, len(bundles)).sizes[0]
        engine = replace(engine, threads=max(1, num_cpus // num_ranks))
    return msgspec.json.encode(asdict(replace(spec.settings, engine=engine, server=server))).decode()
