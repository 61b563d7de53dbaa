"""Checks of a Ray cluster: this machine's Ray, the head, nodes and their resources, penstock, the clock and models on
each node, the store as nodes see it, and replicas that no controller looks after.

Nodes are asked by an actor each that reserves nothing and is ended at once. Nothing else is started or changed.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.core.config import within
from penstock.core.errors import OrchestratorError
from penstock.doctor.findings import Finding, fail, ok, warn
from penstock.doctor.fleet import SKEW_S, fleets_seen, store_places
from penstock.fleet.drivers.driver import ReplicaSpec
from penstock.fleet.drivers.ray import PREFIX, fleet_of
from penstock.fleet.drivers.ray_bundles import Bundle, bundles_for, gpu_shares, told_nodes
from penstock.fleet.drivers.ray_cluster import GroupView, NodeReport, NodeView, RayCluster
from penstock.fleet.drivers.ray_fit import explain_lack, fits, have_room, shown_all
from penstock.fleet.drivers.ray_process import RayProcess
from penstock.fleet.drivers.ray_settings import RaySettings
from penstock.fleet.policy.observation import CapacityType
from penstock.fleet.settings import FleetSettings, PoolSettings, replica_settings
from penstock.hub.sources import local_path, source_of
from penstock.tenancy.fleet import STATUS_STALE_S

_MIN_VERSION = (2, 60)
_REACH_S = 3.0
_PROBE_S = 60.0  # for an interpreter that imports Ray, on a busy node


@dataclass(frozen=True)
class RayPool:
    name: str
    replicas: Mapping[str, ReplicaSpec]  # by the place that it is for
    settings: RaySettings = field(default_factory=RaySettings)
    path: str = ""  # of its model on nodes; empty: the model is fetched by name
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def bundles(self, nodes: Sequence[NodeView]) -> dict[str, list[Bundle]]:
        """Resources of a replica on this cluster, by place."""
        return {place: bundles_for(spec, self.settings, nodes) for place, spec in self.replicas.items()}


@dataclass(frozen=True)
class RayUse:
    """A fleet's use of a Ray cluster, or anybody's: then there are no pools."""

    address: str = "auto"
    namespace: str = "penstock"
    zone_prefix: str = "zone:"
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    pools: tuple[RayPool, ...] = ()
    store: str = ""  # its URL

    def runtime_envs(self) -> list[Mapping[str, Any]]:
        """Those that differ: usually one."""
        found: list[Mapping[str, Any]] = []
        for env in [pool.runtime_env for pool in self.pools] or [self.runtime_env]:
            if env not in found:
                found.append(env)
        return found


def use_of_fleet(settings: FleetSettings, store: str) -> RayUse | None:
    """None: its replicas are not on Ray. Raises ConfigError."""
    if settings.driver != "ray":
        return None
    pools = tuple(_pool(settings, name, pool) for name, pool in settings.pool_settings().items())
    own = settings.ray
    return RayUse(settings.address or "auto", own.namespace, own.zone_prefix, own.runtime_env, pools, store)


def _pool(settings: FleetSettings, name: str, pool: PoolSettings) -> RayPool:
    own: RaySettings = settings.ray.of_pool(name, pool.ray)
    engine = replica_settings(name, pool, settings.slo_of(name, pool), shares_machine=False)
    with within(f"pools.{name}."):
        gpu_shares(pool.engine, pool.gpus, told_nodes(pool.engine, own) or 1)
    kinds = [CapacityType.ON_DEMAND]
    if pool.spot.share and own.capacity_prefix:
        kinds.append(CapacityType.SPOT)
    replicas = {}
    for zone in pool.zones or [""]:
        for kind in kinds:
            place = ", ".join(part for part in (f"zone {zone}" * bool(zone), str(kind) * (len(kinds) > 1)) if part)
            replicas[place] = ReplicaSpec("", name, engine, zone=zone, capacity_type=kind, gpus=pool.gpus)
    path = str(local_path(pool.model)) if source_of(pool.model) is None else ""
    return RayPool(name, replicas, own, path, own.runtime_env)


def cluster(use: RayUse) -> Iterator[Finding]:
    client = list(_client(use.address))
    yield from client
    if all(one.verdict == "ok" for one in client):
        yield from asyncio.run(_collected(use))


async def _collected(use: RayUse) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        ray = RayProcess(use.address, use.namespace, Path(directory) / "ray.log")
        try:
            return [finding async for finding in look(ray, use)]
        finally:
            await ray.close()


def _client(address: str) -> Iterator[Finding]:
    """This machine's Ray, and whether something listens at the address."""
    if find_spec("ray") is None:
        yield fail("ray", "Ray is not installed here", "pip install 'penstock[ray]'")
        return
    yield check_version(version("ray"))
    if address.startswith("ray://"):
        hint = (
            "make this machine a node (`ray start --address=HEAD:6379 --num-cpus=0`), and give the head's own address"
        )
        yield fail("ray", f"{address} is of Ray Client, which breaks with its server", hint)
        return
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        except OSError as error:
            hint = "is the head running (`ray status`), is this its address, and is the network open towards it?"
            yield fail("ray", f"{address} cannot be reached: {error.strerror or error}", hint)


def check_version(found: str) -> Finding:
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < _MIN_VERSION:
        needed = ".".join(map(str, _MIN_VERSION))
        return fail("ray", f"Ray {found} is too old", f"pip install 'ray[default]>={needed}', here and on every node")
    return ok("ray", f"Ray {found} is installed here")


async def look(ray: RayCluster, use: RayUse) -> AsyncIterator[Finding]:
    try:
        nodes = await ray.nodes()
    except OrchestratorError as error:
        hint = "is this machine one of its nodes, with its Ray and Python, and its token where RAY_AUTH_MODE is set?"
        yield fail("ray", f"{use.address}: {error.message}", hint)
        return
    yield ok("ray", f"{use.address} answers; namespace {use.namespace}")
    for findings in (check_nodes(nodes, time.time()), check_zones(nodes, use), check_room(nodes, use)):
        for finding in findings:
            yield finding
    asked = [node for node in nodes if node.is_usable and is_for_replicas(node, use.pools, nodes)]
    for env in use.runtime_envs():
        paths = sorted({pool.path for pool in use.pools if pool.path and pool.runtime_env == env})
        try:
            reports = await ray.probe([node.id for node in asked], env, paths, store_places(use.store), _PROBE_S)
        except OrchestratorError as error:
            yield fail("nodes", f"they could not be asked: {error.message}", "see the logs of Ray on the head")
            continue
        for finding in check_reports(asked, reports, has_store=bool(store_places(use.store))):
            yield finding
    try:
        groups = (await ray.view(PREFIX)).groups
    except OrchestratorError as error:
        yield fail(
            "fleets", f"placement groups could not be listed: {error.message}", "see the logs of Ray on the head"
        )
        return
    for finding in check_fleets(groups, await asyncio.to_thread(fleets_seen, use.store)):
        yield finding


def is_for_replicas(node: NodeView, pools: Sequence[RayPool], nodes: Sequence[NodeView]) -> bool:
    """Whether a replica could be placed on a node; the head and the controller's machine often have nothing to give."""
    if pools:
        wanted = [bundle for pool in pools for bundles in pool.bundles(nodes).values() for bundle in bundles]
        return any(fits(bundle, node) for bundle in wanted)
    return bool(node.resources.get("CPU") or node.resources.get("GPU"))


def check_nodes(nodes: Sequence[NodeView], now: float) -> Iterator[Finding]:
    living = [node for node in nodes if node.is_alive]
    if not any(node.is_usable for node in living):
        yield fail(
            "nodes", f"of {_number(len(living))} alive none takes new work", "add one: `ray start --address=HEAD:6379`"
        )
    else:
        yield ok("nodes", f"{_number(len(living))} alive")
    if lost := [node for node in nodes if not node.is_alive and not node.is_expected_death]:
        why = f": {lost[-1].death}" if lost[-1].death else ""
        hint = "start Ray there again, or see its raylet.out; Ray shows a lost node until its head starts anew"
        yield warn("nodes", f"{_which(lost[::-1])} ended without notice{why}", hint)
    for node in living:
        if node.drains_at is not None:
            when = f"goes in {max(0.0, node.drains_at - now):.0f} s" if node.drains_at else "goes, nobody said when"
            hint = "its replicas get a notice and are replaced elsewhere: is there room?"
            yield warn("nodes", f"{node.shown} is draining and {when}", hint)


def check_zones(nodes: Sequence[NodeView], use: RayUse) -> Iterator[Finding]:
    """Zones that nodes are marked with. Whether pools can be placed in theirs is a matter of room."""
    usable = [node for node in nodes if node.is_usable and is_for_replicas(node, (), nodes)]
    zones = Counter(
        key.removeprefix(use.zone_prefix)
        for node in usable
        for key in node.resources
        if key.startswith(use.zone_prefix)
    )
    unzoned = [node for node in usable if not any(key.startswith(use.zone_prefix) for key in node.resources)]
    if zones:
        yield ok("zones", ", ".join(f"{zone} ({_number(number)})" for zone, number in sorted(zones.items())))
    if unzoned:
        mark = f"""`ray start --resources='{{"{use.zone_prefix}a": 1000}}'`"""
        hint = f"{mark}, or set ray.zone_prefix: pools with zones have no place there, others are not spread"
        yield warn("zones", f"{_which(unzoned)} without a resource {use.zone_prefix}…", hint)
    gpus = [node for node in usable if node.resources.get("GPU")]
    if gpus:
        total = sum(node.resources["GPU"] for node in gpus)
        yield ok(
            "gpus", f"{total:g} on {_number(len(gpus))}, at most {max(node.resources['GPU'] for node in gpus):g} on one"
        )


def check_room(nodes: Sequence[NodeView], use: RayUse) -> Iterator[Finding]:
    """Whether some node has what a replica reserves, in use or not, in each place where a pool may have one."""
    for pool in use.pools:
        wanted = pool.bundles(nodes)
        lacking = {place: bundles for place, bundles in wanted.items() if not have_room(bundles, nodes)}
        good = [place for place in wanted if place not in lacking]
        if good:
            where = f" in {'; '.join(good)}" if good != [""] else ""
            yield ok("room", f"{pool.name}: nodes have what a replica takes{where}")
        for place, bundles in lacking.items():
            where = f" in {place}" if place else ""
            says = f"{pool.name}: no node has {shown_all(bundles)}{where}"
            why = explain_lack(bundles, nodes)
            hint = f"{why}. Where Ray's autoscaler adds such nodes all is well"
            yield warn("room", says, hint) if good else fail("room", says, hint)


def check_reports(
    nodes: Sequence[NodeView], reports: Sequence[NodeReport], *, has_store: bool = False
) -> Iterator[Finding]:
    by_id = {node.id: node for node in nodes}
    asked = [(by_id[report.node], report) for report in reports if report.node in by_id]
    silent = [(node, report) for node, report in asked if report.failure]
    for node, report in silent:
        hint = "see Ray's log directory there; a runtime_env that cannot be made is told there, too"
        yield fail("nodes", f"{node.shown} runs no actor: {report.failure}", hint)
    answered = [(node, report) for node, report in asked if not report.failure]
    if not answered:
        return
    yield from _versions(answered)
    yield from _clocks(answered)
    for path in sorted({path for _, report in answered for path in report.missing}):
        lacking = [node for node, report in answered if path in report.missing]
        hint = "put the model there, or name one that nodes can fetch: paths of models are the nodes' own"
        yield fail("model", f"{path} is not on {_which(lacking)}", hint)
    if has_store:
        cut_off = [(node, report) for node, report in answered if report.store_failure]
        if cut_off:
            hint = "replicas need none, but a controller or gateway on such a node would"
            which = _which([node for node, _ in cut_off])
            yield warn("store", f"{which} cannot reach it: {cut_off[0][1].store_failure}", hint)
        else:
            yield ok("store", f"{_number(len(answered))} can reach it")


def _versions(answered: Sequence[tuple[NodeView, NodeReport]]) -> Iterator[Finding]:
    found = Counter(
        f"penstock {one.penstock}, Ray {one.ray}, Python {one.python}" for _, one in answered if one.penstock
    )
    if broken := [(node, one) for node, one in answered if not one.penstock]:
        which, why = _which([node for node, _ in broken]), broken[0][1].problem
        hint = (
            f"pip install 'penstock[engine,ray]=={__version__}' for the Python that runs Ray there, or ray.runtime_env"
        )
        yield fail("versions", f"{which} cannot import penstock: {why}", hint)
    if bare := [node for node, one in answered if one.penstock and not one.has_torch]:
        yield fail(
            "versions", f"{_which(bare)} without torch: no engine can run", "pip install 'penstock[engine]' there"
        )
    if others := [(node, one) for node, one in answered if one.penstock not in ("", __version__)]:
        which, theirs = _which([node for node, _ in others]), others[0][1].penstock
        hint = f"fine for a while, as in an upgrade; then pip install penstock=={__version__} there"
        yield warn("versions", f"{which} with penstock {theirs}; this is {__version__}", hint)
    elif len(found) > 1:
        listed = "; ".join(f"{_number(number)} with {what}" for what, number in found.most_common())
        yield warn(
            "versions", listed, "give all nodes the same Python and Ray: actors are code of one, run by the other"
        )
    elif found:
        yield ok("versions", f"{_number(len(answered) - len(broken))} with {next(iter(found))}")


def _clocks(answered: Sequence[tuple[NodeView, NodeReport]]) -> Iterator[Finding]:
    """Clock skew of an answer that took so long is known no better than by half of that."""
    off = [(node, one) for node, one in answered if abs(one.skew_s) > SKEW_S + one.skew_error_s]
    for node, one in off:
        hint = "run NTP on both: deadlines of draining nodes and logs are times of day"
        yield warn("clock", f"{node.shown} differs by {one.skew_s:+.0f} s", hint)
    if not off:
        yield ok("clock", f"this machine's and those of {_number(len(answered))} agree")


def check_fleets(groups: Sequence[GroupView], seen_s: Mapping[str, float]) -> Iterator[Finding]:
    """Replicas by fleet, each the placement group and actor of one. `seen_s`: how long ago controllers wrote."""
    by_fleet: dict[str, list[GroupView]] = {}
    for group in groups:
        by_fleet.setdefault(fleet_of(group.name), []).append(group)
    for fleet, own in sorted(by_fleet.items()):
        says = f"{fleet}: {_counted(own)}"
        if fleet not in seen_s:
            hint = (
                "is this the fleet's store (--store URL)? If the fleet is nobody's, `penstock fleet down` with a file "
                f"that has `name: {fleet}` frees what it holds"
            )
            yield warn("fleets", f"{says}, and the store knows no such fleet", hint)
        elif seen_s[fleet] > STATUS_STALE_S:
            hint = "`penstock fleet --config …` takes them over, `penstock fleet down --config …` ends them"
            yield warn("fleets", f"{says}, and no controller has been at work for {seen_s[fleet]:.0f} s", hint)
        else:
            yield ok("fleets", f"{says}, and a controller is at work")


def _counted(groups: Sequence[GroupView]) -> str:
    kinds = Counter(
        "failed"
        if group.actor.failure
        else "waiting for room"
        if not group.nodes
        else "running"
        if group.actor.is_begun
        else "not begun"
        for group in groups
    )
    listed = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    return f"{_number(len(groups), 'placement group')} ({listed})"


def _number(number: int, noun: str = "node") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _which(nodes: Sequence[NodeView]) -> str:
    if len(nodes) == 1:
        return f"node {nodes[0].shown}"
    return f"{len(nodes)} nodes, such as {nodes[0].shown},"
