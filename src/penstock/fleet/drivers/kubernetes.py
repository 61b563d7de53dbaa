"""Replicas as pods of a Kubernetes cluster: the scheduler places them, the kubelet probes them, this driver asks.

Pods are followed by a watch, so that to list them costs the API server nothing. A listing that may be old is an error:
the controller then waits, and replicas go on. Nothing is kept here that the cluster does not know: a driver that begins
anew finds its replicas by their labels.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from penstock.core.errors import CapacityRefused, OrchestratorError
from penstock.fleet.drivers import kubernetes_status as status
from penstock.fleet.drivers.driver import DriverReplica, ReplicaNote, ReplicaSpec
from penstock.fleet.drivers.kubernetes_notes import PodNotes
from penstock.fleet.drivers.kubernetes_pod import DOMAIN, INDEX_LABEL, pod_name, render_group, render_pod, selector
from penstock.fleet.drivers.kubernetes_settings import KubernetesSettings
from penstock.fleet.policy.observation import CapacityType
from penstock.fleet.settings import FleetSettings
from penstock.http.kubernetes_api import KubernetesApi, Object
from penstock.http.kubernetes_objects import is_ready, pod_url, spec_of
from penstock.http.kubernetes_watch import KubernetesWatch

_CONFIRM_S = 15.0  # a node that is lost confirms nothing, and its pods are removed without


class KubernetesDriver:
    """Belongs to the event loop."""

    def __init__(
        self, settings: FleetSettings, api: KubernetesApi, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = settings.name
        self._pools = settings.pool_settings()
        self._settings = settings.kubernetes
        self._api = api
        self._clock = clock
        self._pods = KubernetesWatch(api, self._path, selector(settings.name), changed=self._pods_changed)
        self._groups: KubernetesWatch | None = None  # replicas over several nodes
        if any(self._settings_of(name).nodes > 1 for name in self._pools):
            self._groups = KubernetesWatch(api, self._groups_path, selector(settings.name), changed=self._pods_changed)
        self._nodes = KubernetesWatch(api, lambda: "/api/v1/nodes")
        self._foreign = {  # pods that something else starts and stops, by pool
            name: KubernetesWatch(api, self._path, chosen)
            for name, pool in self._pools.items()
            if pool.advisory and (chosen := self._settings_of(name).selector)
        }
        self._notes = PodNotes(api, clock)
        self._changed = asyncio.Event()
        self._deadlines: dict[str, float] = {}  # of pods that will be taken away, by uid
        self._waits: dict[str, float] = {}  # since when no node takes a pod, by uid

    async def start(self, spec: ReplicaSpec) -> None:
        settings = self._settings_of(spec.pool)
        pool = self._pools.get(spec.pool)
        render = render_pod if settings.nodes == 1 else render_group
        manifest = render(self._fleet, spec, settings, pool.start_timeout_s if pool is not None else 600.0)
        await self._api.connect()
        try:
            path = self._path() if settings.nodes == 1 else self._groups_path()
            made = await self._api.request("POST", path, body=manifest)
        except OrchestratorError as error:
            if error.reason == "AlreadyExists":
                return
            if error.reason == "Forbidden" and "exceeded quota" in error.message:
                raise CapacityRefused(error.message) from None
            raise
        if made.get("kind") == "Pod":
            self._pods.put(made)
        elif self._groups is not None:
            self._groups.put(made)

    async def stop(self, replica_id: str, grace_s: float) -> None:
        await self._pods.current()
        if self._groups is not None:
            await self._groups.current()
        found = self._find(replica_id)
        settings = self._settings_of(_pool(found) if found is not None else "")
        is_group = settings.nodes > 1 or (found is not None and _is_of_group(found))
        path = f"{self._groups_path() if is_group else self._path()}/{pod_name(replica_id)}"
        # A grace of 0 would remove the pod before its process has ended.
        wait_s = math.ceil(grace_s + settings.pre_stop_s) if grace_s > 0 else 1
        if not await self._delete(path, wait_s):
            return
        while not await self._is_gone_within(replica_id, wait_s + _CONFIRM_S):
            wait_s = 0
            if (left := self._find_pod(replica_id)) is not None and self._is_node_lost(left):
                await self._delete(f"{self._path()}/{left['metadata']['name']}", 0)

    async def list(self) -> Sequence[DriverReplica]:
        self._nodes.start()
        pods = await self._pods.current()
        foreign = {name: await watch.current() for name, watch in self._foreign.items()}
        with suppress(OrchestratorError):  # whoever may not see nodes has fewer signs
            await self._nodes.current()
        now, uids = self._clock(), {*pods, *(uid for found in foreign.values() for uid in found)}
        for known in (self._deadlines, self._waits):
            for uid in known.keys() - uids:
                del known[uid]
        # A group without its first pod is about to get one.
        groups = await self._groups.current() if self._groups is not None else {}
        replicas = {one.id: one for group in groups.values() for one in [self._replica(group, now)]}
        replicas |= {one.id: one for pod in pods.values() if _is_leader(pod) for one in [self._replica(pod, now)]}
        for name, found in foreign.items():
            replicas |= {one.id: one for pod in found.values() for one in [self._adoptable(name, pod, now)]}
        return sorted(replicas.values(), key=lambda one: one.id)

    def note(self, notes: Mapping[str, ReplicaNote]) -> None:
        own = [
            (pod, self._pods, note)
            for pod in self._pods.objects.values()
            if (note := notes.get(_replica_id(pod))) is not None
        ]
        foreign = [
            (pod, watch, note)
            for watch in self._foreign.values()
            for pod in watch.objects.values()
            if (note := notes.get(pod["metadata"]["name"])) is not None
        ]
        self._notes.show(own + foreign, has_cost=lambda pod: not _replica_id(pod))

    async def close(self) -> None:
        self._notes.close()
        groups = (self._groups,) if self._groups is not None else ()
        for watch in (self._pods, self._nodes, *groups, *self._foreign.values()):
            await watch.close()
        await self._api.close()

    # -- inside

    def _replica(self, pod: Object, now: float) -> DriverReplica:
        metadata, labels = pod["metadata"], pod["metadata"].get("labels") or {}
        settings = self._settings_of(_pool(pod))
        why, is_refused = status.failure(pod), False
        if not why and (unplaced := status.unschedulable(pod)):
            since = self._waits.setdefault(metadata["uid"], now)
            if now - since >= settings.unschedulable_s:
                why, is_refused = unplaced, True
        is_spot = labels.get(f"{DOMAIN}/capacity-type") == CapacityType.SPOT.value
        return DriverReplica(
            _replica_id(pod),
            _pool(pod),
            pod_url(pod),
            labels.get(f"{DOMAIN}/zone", ""),
            CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND,
            why,
            self._seconds_left(pod, settings, now),
            is_refused=is_refused,
            is_ready=is_ready(pod),
        )

    def _adoptable(self, pool: str, pod: Object, now: float) -> DriverReplica:
        """A pod that something else starts and stops."""
        settings, node = self._settings_of(pool), self._node(pod)
        labels = (node["metadata"].get("labels") if node is not None else None) or {}
        return DriverReplica(
            pod["metadata"]["name"],
            pool,
            pod_url(pod) or pod_url(pod, settings.port),
            labels.get(settings.zone_key, ""),
            failure=status.failure(pod),
            deadline_s=self._seconds_left(pod, settings, now),
            is_ready=is_ready(pod),
        )

    def _seconds_left(self, pod: Object, settings: KubernetesSettings, now: float) -> float | None:
        """The time counts from when the sign was first seen: machines' clocks need not agree."""
        uid = pod["metadata"]["uid"]
        seconds = status.notice_s(pod, self._node(pod), settings.node_drain_s)
        if seconds is None:
            self._deadlines.pop(uid, None)
            return None
        deadline = self._deadlines[uid] = min(self._deadlines.get(uid, math.inf), now + seconds)
        left_s = max(0.0, deadline - now)
        return min(seconds, left_s)  # a sum of floats may be rounded up

    async def _delete(self, path: str, grace_s: int) -> bool:
        """Whether there was something to delete."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": grace_s}
        try:
            left = await self._api.request("DELETE", path, body=body | {"propagationPolicy": "Background"})
        except OrchestratorError as error:
            if error.reason == "NotFound":
                return False
            raise
        if left.get("kind") == "Pod":
            self._pods.put(left)
        return True

    async def _is_gone_within(self, replica_id: str, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._find(replica_id) is not None:
                    await self._changed.wait()
        return self._find(replica_id) is None

    def _pods_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _find(self, replica_id: str) -> Object | None:
        """A replica's pod, or the group that is to have it."""
        if (pod := self._find_pod(replica_id)) is not None or self._groups is None:
            return pod
        return next((one for one in self._groups.objects.values() if _replica_id(one) == replica_id), None)

    def _find_pod(self, replica_id: str) -> Object | None:
        for pod in self._pods.objects.values():
            if _is_leader(pod) and _replica_id(pod) == replica_id:
                return pod
        return None

    def _node(self, pod: Object) -> Object | None:
        name = spec_of(pod).get("nodeName")
        return next((node for node in self._nodes.objects.values() if node["metadata"]["name"] == name), None)

    def _is_node_lost(self, pod: Object) -> bool:
        is_known = bool(self._nodes.objects) and self._nodes.failure is None
        return is_known and status.is_lost(self._node(pod))

    def _settings_of(self, pool: str) -> KubernetesSettings:
        found = self._pools.get(pool)
        return self._settings.of_pool(pool, found.kubernetes) if found is not None else self._settings

    def _groups_path(self) -> str:
        return f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{self._api.namespace}/leaderworkersets"

    def _path(self) -> str:
        return f"/api/v1/namespaces/{self._api.namespace}/pods"


def _pool(pod: Object) -> str:
    return str(pod["metadata"]["annotations"][f"{DOMAIN}/pool"])


def _replica_id(pod: Object) -> str:
    """Empty: the pod is not of this driver."""
    return str((pod["metadata"].get("annotations") or {}).get(f"{DOMAIN}/replica", ""))


def _is_of_group(pod: Object) -> bool:
    return INDEX_LABEL in (pod["metadata"].get("labels") or {})


def _is_leader(pod: Object) -> bool:
    """Whether a pod stands for its replica: of a group over several nodes, the first does."""
    return bool(_replica_id(pod)) and (pod["metadata"].get("labels") or {}).get(INDEX_LABEL, "0") == "0"
