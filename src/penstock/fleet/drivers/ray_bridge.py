"""The process that speaks with Ray: `python -m penstock.fleet.drivers.ray_bridge`, a child of the fleet controller.

Ray's calls block, and a process that is connected to Ray is ended by it when the head is away for a minute. So no
controller is connected: it writes requests to this process and reads answers, a line of JSON each (`ray_process`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import msgspec
from ray._private.state import state
from ray.core.generated.common_pb2 import NodeDeathInfo
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import ray
from penstock.core.converter import Converter
from penstock.core.crash_stacks import write_stacks_on_crash
from penstock.fleet.drivers import ray_probe
from penstock.fleet.drivers.ray_actor import ReplicaActor
from penstock.fleet.drivers.ray_cluster import (
    ActorView,
    ClusterView,
    EngineOrder,
    GroupView,
    NodeReport,
    NodeView,
    as_one,
)
from penstock.link.parent_death import end_with_parent

_STATUS_S = 2.0  # for actors to answer; one that is late is taken as it was
_STOP_S = 15.0  # beyond the grace: for a node that does not answer
_BEGIN_S = 60.0
_REACH_S = 10.0
_EXPECTED_DEATHS = (
    NodeDeathInfo.EXPECTED_TERMINATION,
    NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED,
    NodeDeathInfo.AUTOSCALER_DRAIN_IDLE,
)
_engine_order_converter = Converter(EngineOrder)


class Request(msgspec.Struct):
    id: int
    method: str
    arguments: dict[str, Any]


_request_decoder = msgspec.json.Decoder(Request)


class Reply(msgspec.Struct):
    id: int
    result: Any = None
    failure: str = ""


class Bridge:
    """Belongs to many threads: Ray's calls may be made by any."""

    def __init__(self, *, address: str, namespace: str) -> None:
        """Raises what Ray does where it cannot be reached."""
        _reach(address)
        ray.init(address=address, namespace=namespace, logging_level=logging.WARNING, log_to_driver=False)
        self._namespace = namespace
        self._actor = ray.remote(ReplicaActor)
        self._lock = threading.Lock()
        self._asked: dict[str, Any] = {}  # references to answers of actors that are late
        self._views: dict[str, ActorView] = {}  # as last seen

    def create_group(self, *, name: str, bundles: Sequence[Mapping[str, float]], wait_s: float) -> bool:
        group = _find_group(name)
        if group is None:
            strategy = "STRICT_PACK" if len(bundles) == 1 else "STRICT_SPREAD"
            wanted = [dict(bundle) for bundle in bundles]
            group = ray.util.placement_group(wanted, strategy=strategy, name=name, lifetime="detached")
        return bool(group.wait(wait_s))

    def remove_group(self, *, name: str) -> None:
        if (group := _find_group(name)) is not None:
            remove_placement_group(group)

    def start_engine(self, *, name: str, bundles: Sequence[Mapping[str, float]], order: Mapping[str, Any]) -> None:
        told = _engine_order_converter.convert(order)
        group = _find_group(name)
        if group is None:
            raise ValueError(f"there is no placement group {name}")
        actors = [self._make_actor(group, name, node, bundle, told) for node, bundle in enumerate(bundles)]
        places: list[dict[str, Any] | None] = [None]
        if len(actors) > 1:
            first = ray.get(actors[0].reserve.remote(), timeout=_BEGIN_S)
            places = [{"count": len(actors), "rank": node, "first": first} for node in range(len(actors))]
        begun = [
            actor.begin.remote(told.config, told.secret, place) for actor, place in zip(actors, places, strict=True)
        ]
        ray.get(begun, timeout=_BEGIN_S)

    def _make_actor(
        self, group: PlacementGroup, name: str, node: int, bundle: Mapping[str, float], told: EngineOrder
    ) -> Any:
        """The actor on one of a group's nodes, unless it is there."""
        resources = {key: value for key, value in bundle.items() if key not in ("CPU", "GPU")}
        log_name = name.partition("?")[0].replace("/", "-")
        return self._actor.options(
            name=_actor_name(name, node),
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            max_concurrency=4,
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=resources or None,
            runtime_env=dict(told.runtime_env) or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, node),
        ).remote(f"{log_name}-node{node}" if node else log_name)

    def stop_engine(self, *, name: str, grace_s: float) -> None:
        """All nodes are told at once: those behind the first wait for it."""
        asked = []
        for actor in next((_actor_names(one) for one in self._groups() if one.name == name), [name]):
            with contextlib.suppress(ValueError, RayActorError):
                asked.append(ray.get_actor(actor).stop.remote(grace_s))
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=grace_s + _STOP_S)

    def view(self, *, prefix: str) -> ClusterView:
        found = [one for one in self._groups() if one.name.startswith(prefix)]
        actors = {actor for one in found for actor in _actor_names(one)}
        living = set(ray.util.list_named_actors()) & actors
        with self._lock:
            self._ask(living)
            for gone in [name for name in self._views if name.startswith(prefix) and name not in actors]:
                del self._views[gone]
                self._asked.pop(gone, None)
            self._views |= {name: self._look(name, is_living=name in living) for name in actors}
            groups = [
                GroupView(one.name, _nodes(one), as_one([self._views[actor] for actor in _actor_names(one)]))
                for one in found
            ]
        draining = {node: deadline_ms / 1000 for node, deadline_ms in state.get_draining_nodes().items()}
        return ClusterView(groups, draining)

    def _groups(self) -> list[PlacementGroupTableData]:
        """Placement groups of this namespace. Ray's `placement_group_table` mixes those of all namespaces."""
        found = map(PlacementGroupTableData.FromString, state._connect_and_get_accessor().get_placement_group_table())
        removed = PlacementGroupTableData.REMOVED
        return [one for one in found if one.ray_namespace == self._namespace and one.state != removed]

    def nodes(self) -> list[NodeView]:
        draining = state.get_draining_nodes()
        return [
            NodeView(
                one["NodeID"],
                one["NodeManagerAddress"],
                {key: float(value) for key, value in one["Resources"].items() if not key.startswith("node:")},
                one["Alive"],
                draining[one["NodeID"]] / 1000 if one["NodeID"] in draining else None,
                "" if one["Alive"] else _short(one.get("DeathReasonMessage") or ""),
                not one["Alive"] and one.get("DeathReason") in _EXPECTED_DEATHS,
            )
            for one in ray.nodes()
        ]

    def probe(
        self,
        *,
        nodes: Sequence[str],
        runtime_env: Mapping[str, Any],
        paths: Sequence[str],
        store: Sequence[tuple[str, int]],
        wait_s: float,
    ) -> list[NodeReport]:
        """Actors reserve nothing, so that a node that is full can be asked; each is ended with its answers."""
        ray.cloudpickle.register_pickle_by_value(ray_probe)  # nodes may have none, or another
        probe = ray.remote(ray_probe.NodeProbe)
        actors = {
            node: probe.options(
                num_cpus=0,
                max_restarts=0,
                runtime_env=dict(runtime_env) or None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote()
            for node in nodes
        }
        asked = {
            node: actor.report.remote(list(paths), [tuple(one) for one in store]) for node, actor in actors.items()
        }
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=wait_s)
        try:
            return [self._report(node, actors[node], reference) for node, reference in asked.items()]
        finally:
            for actor in actors.values():
                ray.kill(actor)

    @staticmethod
    def _report(node: str, actor: Any, reference: Any) -> NodeReport:
        try:
            found = ray.get(reference, timeout=0)
            ray.get(actor.clock.remote(), timeout=_STATUS_S)  # the first call of a method takes longer
            before = time.time()
            there = ray.get(actor.clock.remote(), timeout=_STATUS_S)
            after = time.time()
        except GetTimeoutError:
            return NodeReport(node, "it has not answered in time")
        except RayError as error:
            return NodeReport(node, _short(str(error)))
        return NodeReport(node, skew_s=there - (before + after) / 2, skew_error_s=(after - before) / 2, **found)

    def _ask(self, names: set[str]) -> None:
        """Asks all of them how they are, but those that have not answered yet."""
        new = []
        for name in names - set(self._asked):
            with contextlib.suppress(ValueError):  # it has ended since
                self._asked[name] = ray.get_actor(name).status.remote()
                new.append(self._asked[name])
        if new:
            ray.wait(new, num_returns=len(new), timeout=_STATUS_S)

    def _look(self, name: str, *, is_living: bool) -> ActorView:
        before = self._views.get(name, ActorView())
        reference = self._asked.get(name)
        if reference is not None and ray.wait([reference], timeout=0)[0]:
            del self._asked[name]
            try:
                return ActorView(**ray.get(reference))
            except RayActorError as error:
                return _ended(before, str(error))
        if is_living or before.failure:
            return before
        return _ended(before, _death_cause(name))


def _reach(address: str) -> None:
    """Raises OSError where nothing listens at an address with a port: Ray itself would try for minutes."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit() and "://" not in address:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        except OSError as error:
            raise OSError(f"{address} cannot be reached: {error.strerror or error}") from None


def _ended(before: ActorView, why: str) -> ActorView:
    """An actor that has never been is none that has ended."""
    return msgspec.structs.replace(before, is_begun=before.is_begun or bool(why), failure=_short(why))


def _short(why: str) -> str:
    """Ray's reports of an end have a line for each of their fields."""
    return " ".join(why.split())[:500]


def _death_cause(name: str) -> str:
    """Returns why Ray's actor of this name has ended; empty: there has been none."""
    for one in state.actor_table(None, actor_state_name="DEAD").values():
        if one["Name"] == name:
            return str(one["DeathCause"].actor_died_error_context.error_message) or "Ray ended its actor"
    return ""


def _actor_name(group: str, node: int) -> str:
    return f"{group}#{node}" if node else group


def _actor_names(group: PlacementGroupTableData) -> list[str]:
    return [_actor_name(group.name, node) for node in range(len(group.bundles))]


def _nodes(group: PlacementGroupTableData) -> list[str]:
    """None while one of its bundles has no node."""
    found = [bundle.node_id.hex() for bundle in group.bundles]
    return found if all(found) else []


def _find_group(name: str) -> PlacementGroup | None:
    with contextlib.suppress(ValueError):
        return ray.util.get_placement_group(name)
    return None


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answers until there are no more requests. The first one is to connect; each other one gets a thread."""
    lock, encoder = threading.Lock(), msgspec.json.Encoder()

    def answer(request: Request, method: Callable[..., Any]) -> bool:
        reply = Reply(request.id)
        try:
            reply.result = method(**request.arguments)
        except Exception as error:
            reply.failure = _short(str(error)) or type(error).__name__
        with lock:
            replies.write(encoder.encode(reply) + b"\n")
            replies.flush()
        return not reply.failure

    bridge: Bridge | None = None

    def connect(**arguments: Any) -> None:
        nonlocal bridge
        bridge = Bridge(**arguments)

    for line in requests:
        request = _request_decoder.decode(line)
        if bridge is None:
            if not answer(request, connect):
                return
        else:
            threading.Thread(target=answer, args=(request, getattr(bridge, request.method)), daemon=True).start()


def _end_with_parent() -> None:
    """The end of requests is not enough: Ray tries for minutes to connect, and lets no other thread run meanwhile."""
    end_with_parent(signal.SIGKILL)


if __name__ == "__main__":
    write_stacks_on_crash()
    _end_with_parent()
    own = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Ray prints is no answer
    serve(sys.stdin.buffer, own)
    os._exit(0)
