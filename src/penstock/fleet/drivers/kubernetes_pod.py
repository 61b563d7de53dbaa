"""A replica as a pod, and back: manifests, names, labels. It asks no cluster anything.

Labels: app.kubernetes.io/{name,component,part-of,managed-by,version}, penstock.dev/{fleet,pool,replica,version,state,
zone,capacity-type}. The pool's and the replica's exact names, which a label may not be able to hold, are annotations.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock import __version__
from penstock.api.relay import SECRET_VARIABLE
from penstock.core.errors import ConfigError
from penstock.core.nodes import spread_settings
from penstock.core.settings import EngineSettings, Settings
from penstock.fleet.drivers.driver import ReplicaSpec
from penstock.fleet.drivers.kubernetes_settings import KubernetesSettings
from penstock.fleet.policy.observation import CapacityType
from penstock.http.kubernetes_api import Object

CONTAINER = "penstock"
WORKER_COMPONENT = "replica-worker"  # of pods with ranks alone: gateways and the controller do not look for them
DOMAIN = "penstock.dev"
INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
_HOME = "/var/cache/penstock"
_MARGIN_S = 10  # for a process to end, after its streams have
_PERIOD_S = 5  # of probes
_MAX_NAME = 52  # of a pod that may get an ordinal, in a label of 63 characters
_PLACES = ("metadata", "spec")
_OF_A_SERVER = ("ports", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle")


def selector(fleet: str) -> str:
    """Label selector of a fleet's replicas."""
    return f"app.kubernetes.io/managed-by=penstock,app.kubernetes.io/component=replica,{DOMAIN}/fleet={_label(fleet)}"


def pod_name(replica_id: str) -> str:
    """A name that a pod can have; the same for the same replica. One that had to be changed gets a hash."""
    name = re.sub(r"[^a-z0-9-]+", "-", replica_id.lower()).strip("-")
    if name == replica_id and len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(replica_id.encode()).hexdigest()[:8]
    return f"{name[: _MAX_NAME - 9].strip('-') or 'replica'}-{digest}"


def render_pod(fleet: str, spec: ReplicaSpec, settings: KubernetesSettings, start_timeout_s: float) -> Object:
    """Manifest of a replica's pod. Raises ConfigError."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(spec.id),
            "labels": _labels(fleet, spec),
            "annotations": {f"{DOMAIN}/pool": spec.pool, f"{DOMAIN}/replica": spec.id},
        },
        "spec": _pod_spec(spec, settings, start_timeout_s),
    }
    for place in settings.template:
        if place not in _PLACES:
            raise ConfigError(f"a pod template has metadata and spec, not '{place}'", param="kubernetes.template")
    merged: Object = merge(pod, settings.template)
    return merged


def render_group(fleet: str, spec: ReplicaSpec, settings: KubernetesSettings, start_timeout_s: float) -> Object:
    """Manifest of a replica over several nodes: a LeaderWorkerSet of one group. The same command runs in all of its
    pods, and LeaderWorkerSet's variables tell each which node it is. A pod that ends is started again and joins again,
    so the others stay. Raises ConfigError."""
    check_group(spec.settings.engine, spec.gpus, settings.nodes)
    of_node = dataclasses.replace(spec, gpus=spec.gpus // settings.nodes)
    leader = render_pod(fleet, of_node, settings, start_timeout_s)
    metadata = leader["metadata"]
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": settings.nodes,
                "restartPolicy": "None",
                "leaderTemplate": _template(leader),
                "workerTemplate": _template(_as_worker(leader)),
            },
        },
    }


def check_group(engine: EngineSettings, gpus: int, num_nodes: int) -> None:
    """Raises ConfigError if ranks, or GPUs, cannot be shared out among the nodes."""
    spread_settings(engine, num_nodes, param="kubernetes.nodes")
    if gpus % num_nodes:
        reason = f"{gpus} GPUs cannot be shared out among {num_nodes} nodes evenly"
        raise ConfigError(reason, param="kubernetes.nodes")


def _template(pod: Object) -> Object:
    """A pod of a StatefulSet, which starts again what ends."""
    return {
        "metadata": {key: pod["metadata"][key] for key in ("labels", "annotations")},
        "spec": pod["spec"] | {"restartPolicy": "Always"},
    }


def _as_worker(leader: Object) -> Object:
    """The pod of a node that has ranks alone: nobody asks it over HTTP, and it stands for no replica. Told to end, it
    waits for the leader itself."""
    metadata = dict(leader["metadata"])
    metadata["labels"] = metadata["labels"] | {"app.kubernetes.io/component": WORKER_COMPONENT}
    containers = [
        {key: value for key, value in one.items() if key not in _OF_A_SERVER} if one["name"] == CONTAINER else one
        for one in leader["spec"]["containers"]
    ]
    return leader | {"metadata": metadata, "spec": leader["spec"] | {"containers": containers}}


def _labels(fleet: str, spec: ReplicaSpec) -> dict[str, str]:
    _, _, version = spec.pool.partition("@")
    own = {
        "fleet": _label(fleet),
        "pool": _label(spec.pool),
        "replica": _label(spec.id),
        "version": _label(version),
        "state": "starting",
        "zone": _label(spec.zone),
        "capacity-type": spec.capacity_type.value.replace("_", "-"),
    }
    return {
        "app.kubernetes.io/name": "penstock",
        "app.kubernetes.io/component": "replica",
        "app.kubernetes.io/part-of": "penstock",
        "app.kubernetes.io/managed-by": "penstock",
        "app.kubernetes.io/version": _label(__version__),
    } | {f"{DOMAIN}/{key}": value for key, value in own.items() if value}


def _pod_spec(spec: ReplicaSpec, settings: KubernetesSettings, start_timeout_s: float) -> Object:
    is_spot = spec.capacity_type is CapacityType.SPOT
    node_selector = settings.node_selector | (settings.spot_node_selector if is_spot else {})
    if spec.zone:
        node_selector[settings.zone_key] = spec.zone
    tolerations = [*settings.tolerations, *(settings.spot_tolerations if is_spot else ())]
    drain_s = math.ceil(spec.settings.server.drain_timeout_s)
    found: Object = {
        "restartPolicy": "Never",  # the controller replaces what ends: it knows what the replica was for
        "terminationGracePeriodSeconds": settings.pre_stop_s + drain_s + _MARGIN_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {f"{DOMAIN}/pool": _label(spec.pool)}},
            }
        ],
        "containers": [_container(spec, settings, start_timeout_s)],
    }
    if node_selector:
        found["nodeSelector"] = node_selector
    if tolerations:
        found["tolerations"] = tolerations
    if settings.service_account is not None:
        found["serviceAccountName"] = settings.service_account
    if settings.cache_volume is not None:
        found["volumes"] = [{"name": "cache", **settings.cache_volume}]
    return found


def _container(spec: ReplicaSpec, settings: KubernetesSettings, start_timeout_s: float) -> Object:
    scheme = "HTTPS" if spec.settings.server.tls_cert is not None else "HTTP"
    resources: Object = {key: dict(value) for key, value in settings.resources.items()}
    if spec.gpus:
        for key in ("requests", "limits"):
            resources.setdefault(key, {})[settings.gpu_resource] = str(spec.gpus)
    env = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": SECRET_VARIABLE, "valueFrom": _secret_key(settings.secret, "gateway-secret")},
        {"name": "PENSTOCK_METRICS_TOKEN", "valueFrom": _secret_key(settings.secret, "metrics-token", optional=True)},
    ]
    if settings.cache_volume is not None:
        env.append({"name": "PENSTOCK_HOME", "value": _HOME})

    def probe(path: str, failures: int) -> Object:
        http = {"path": path, "port": scheme.lower(), "scheme": scheme}
        return {"httpGet": http, "periodSeconds": _PERIOD_S, "timeoutSeconds": _PERIOD_S, "failureThreshold": failures}

    found: Object = {
        "name": CONTAINER,
        "image": settings.image,
        "command": settings.command,
        "args": _arguments(spec.settings, settings.port),
        "ports": [{"name": scheme.lower(), "containerPort": settings.port}],
        "env": env,
        "startupProbe": probe("/health", math.ceil(start_timeout_s / _PERIOD_S)),
        "livenessProbe": probe("/health", 6),
        "readinessProbe": probe("/ready", 1),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if settings.pre_stop_s:
        found["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(settings.pre_stop_s)]}}}
    if resources:
        found["resources"] = resources
    if settings.cache_volume is not None:
        found["volumeMounts"] = [{"name": "cache", "mountPath": _HOME}]
    return found


def _arguments(settings: Settings, port: int) -> list[str]:
    """Settings that are not their defaults travel as JSON; secrets do not. Kubernetes would expand a `$(`."""
    server = dataclasses.replace(settings.server, gateway_secret=None, metrics_token=None, host="127.0.0.1", port=8000)
    chosen = _changed(dataclasses.asdict(dataclasses.replace(settings, server=server)), dataclasses.asdict(Settings()))
    document = msgspec.json.encode({"model": settings.model, **chosen}).decode().replace("$(", "$$(")
    return ["engine", "--settings", document, "--host", "$(POD_IP)", "--port", str(port)]


def _changed(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(usual[key], dict) and usual[key]:
            if inner := _changed(value, usual[key]):
                found[key] = inner
        elif value != usual[key]:
            found[key] = value
    return found


def _secret_key(name: str, key: str, *, optional: bool = False) -> Object:
    return {"secretKeyRef": {"name": name, "key": key, **({"optional": True} if optional else {})}}


def _label(value: str) -> str:
    """A label's value, as near to this as it can be."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", value)[:63].strip("-_.")


def merge(ours: Any, theirs: Any) -> Any:
    """Their values over ours: dictionaries key by key, lists of things with names by name, all else as a whole. A key
    that is null takes ours away."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        merged = {key: merge(ours.get(key), value) for key, value in theirs.items() if value is not None}
        return {key: value for key, value in ours.items() if key not in theirs} | merged
    if isinstance(ours, list) and isinstance(theirs, list) and _is_named(ours) and _is_named(theirs):
        by_name = {one["name"]: one for one in ours}
        for one in theirs:
            by_name[one["name"]] = merge(by_name.get(one["name"]), one)
        return [*by_name.values()]
    return theirs


def _is_named(values: list[Any]) -> bool:
    return all(isinstance(one, dict) and "name" in one for one in values)
