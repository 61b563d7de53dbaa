"""Checks of a Kubernetes cluster: its API, this account's rights in it, its metrics, nodes, clock, Secret and pods.

What is asked for follows from what is to run there: a gateway that finds pods by their labels, or a fleet's controller.
Nothing is changed; a right is asked for by a SelfSubjectAccessReview, which tries nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import urlsplit

from penstock.api.relay import SECRET_VARIABLE
from penstock.core.config import build
from penstock.core.errors import ConfigError, OrchestratorError
from penstock.doctor.findings import Finding, fail, ok, warn
from penstock.doctor.fleet import SKEW_S, replica, skew_s
from penstock.fleet.drivers.kubernetes_pod import pod_name, selector
from penstock.fleet.settings import FleetSettings
from penstock.gateway.membership.kubernetes import PodQuery
from penstock.gateway.settings.gateway import GatewaySettings, ModelSettings, pools_of
from penstock.http.kubernetes_api import ClusterSettings, KubernetesApi, Object
from penstock.http.kubernetes_objects import has_ended, is_ready, pod_url

_INSTALLED = "app.kubernetes.io/name=penstock"  # as the chart labels its pods
_COMPONENT = "app.kubernetes.io/component"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_WATCHED, _MANAGED = ("list", "watch"), ("list", "watch", "create", "patch", "delete")
_REACH_S = 3.0


class Right(NamedTuple):
    purpose: str
    group: str
    resource: str
    verbs: tuple[str, ...]
    namespace: str | None = None  # None: the cluster's own
    name: str = ""  # of the one object that matters, where it is there; empty: all
    is_needed: bool = True


@dataclass(frozen=True)
class PodPool:
    """Replicas that are pods: what they serve, and where they are found."""

    name: str
    settings: ModelSettings
    selector: str
    namespace: str | None = None
    port: int | str | None = None
    scheme: str | None = None
    served_as: str | None = None  # the model's name there; None: pods of several models are found together


@dataclass(frozen=True)
class ClusterUse:
    """Parts of penstock that are to run in a cluster, as far as they need something there."""

    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    drives: bool = False  # a controller starts pods
    lease: str = ""  # the name of the controller's; empty: it needs none
    pools: tuple[PodPool, ...] = ()
    gpu_resource: str = ""  # empty: none is needed
    zone_key: str = "topology.kubernetes.io/zone"
    secret: str = ""
    is_scaled_elsewhere: bool = False  # by an HPA or KEDA


def use_of_gateway(settings: GatewaySettings) -> ClusterUse | None:
    """None: it finds no replicas there."""
    found = [
        PodPool(name, pool, query.selector, query.namespace, query.port, query.scheme, pool.served_as or name)
        for name, pool in pools_of(settings.pools()).items()
        for query in map(PodQuery.parse, pool.kubernetes)
    ]
    return ClusterUse(settings.kubernetes, pools=tuple(found)) if found else None


def use_of_fleet(settings: FleetSettings) -> ClusterUse | None:
    """None: its replicas are no pods."""
    if settings.driver != "kubernetes":
        return None
    pools, own = settings.pool_settings(), settings.kubernetes
    way = build(ModelSettings, {"secret_env": SECRET_VARIABLE, **settings.replica_tls.of_a_gateway})
    return ClusterUse(
        own if settings.address is None else replace(own, context=settings.address),
        drives=not all(pool.advisory for pool in pools.values()),
        lease=pod_name(settings.name) if settings.lease != "store" else "",
        pools=(PodPool(settings.name, way, selector(settings.name)),),
        gpu_resource=own.gpu_resource if any(pool.gpus for pool in pools.values()) else "",
        zone_key=own.zone_key,
        secret=own.secret,
        is_scaled_elsewhere=any(pool.advisory for pool in pools.values()),
    )


def cluster(use: ClusterUse) -> Iterator[Finding]:
    yield from asyncio.run(_collected(use))


async def _collected(use: ClusterUse) -> list[Finding]:
    api = KubernetesApi(use.cluster)
    try:
        return [finding async for finding in _look(api, use)]
    finally:
        await api.close()


async def _look(api: KubernetesApi, use: ClusterUse) -> AsyncIterator[Finding]:
    began = time.monotonic()
    try:
        version = (await api.request("GET", "/version")).get("gitVersion", "of no version")
    except (OrchestratorError, ConfigError) as error:
        yield fail("kubernetes", error.message, "is the kubeconfig's context right, and is its server reachable?")
        return
    yield ok("kubernetes", f"the API server answers, {version}; namespace {api.namespace}")
    yield clock(skew_s(api.date), time.monotonic() - began)
    for right in _rights(api, use):
        yield await _right(api, right)
    for look in (_apis, _nodes, _secret, _installed, _replicas):
        try:
            async for finding in look(api, use):
                yield finding
        except OrchestratorError as error:
            name = look.__name__.strip("_")
            yield warn(name, error.message, "it could not be looked at: see the rights above")


def clock(skew: float, took_s: float) -> Finding:
    """Clock skew by the Date of an answer that took so long: when in that time the server wrote it is not known."""
    if -SKEW_S - took_s <= skew <= SKEW_S:
        return ok("clock", "this machine's and the API server's agree")
    return warn("clock", f"the API server's differs by {skew:+.0f} s", "run NTP on both: tokens and leases have times")


def _rights(api: KubernetesApi, use: ClusterUse) -> Iterator[Right]:
    if use.drives:
        yield Right("the driver", "", "pods", _MANAGED, api.namespace)
    elif use.is_scaled_elsewhere:
        yield Right("the driver", "", "pods", (*_WATCHED, "patch"), api.namespace)
    else:
        for namespace in sorted({pool.namespace or api.namespace for pool in use.pools}):
            yield Right("discovery", "", "pods", _WATCHED, namespace)
    if use.lease:
        verbs = ("get", "create", "update")
        yield Right("the lease", "coordination.k8s.io", "leases", verbs, api.namespace, use.lease)
    if use.drives:
        yield Right("notices of nodes", "", "nodes", _WATCHED, is_needed=False)


async def _right(api: KubernetesApi, right: Right) -> Finding:
    missing = []
    for verb in right.verbs:
        asked = {"verb": verb, "group": right.group, "resource": right.resource, "namespace": right.namespace or ""}
        if right.name and verb != "create":  # a Role may be for this one alone
            asked["name"] = right.name
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        try:
            found = await api.request("POST", _REVIEWS, body=body)
        except OrchestratorError as error:
            return warn("rights", f"{right.purpose}: {error.message}", "this account may not ask for its rights")
        if not (found.get("status") or {}).get("allowed"):
            missing.append(verb)
    where = f"{right.resource} in {right.namespace}" if right.namespace else right.resource
    if not missing:
        return ok("rights", f"{right.purpose}: {', '.join(right.verbs)} {where}")
    says = f"{right.purpose}: this account may not {', '.join(missing)} {where}"
    if right.is_needed:
        return fail("rights", says, "bind the Role of docs/kubernetes.md#rights to it")
    return warn("rights", says, "the ClusterRole of docs/kubernetes.md#rights: without it a node's drain is not seen")


async def _apis(api: KubernetesApi, use: ClusterUse) -> AsyncIterator[Finding]:
    groups = {one["name"] for one in (await api.request("GET", "/apis")).get("groups") or ()}
    if "metrics.k8s.io" in groups:
        yield ok("metrics", "metrics.k8s.io is served")
    else:
        yield warn("metrics", "metrics.k8s.io is not served", "install metrics-server: gateways' HPA goes by it")
    if use.is_scaled_elsewhere:
        found = groups & {"external.metrics.k8s.io", "keda.sh"}
        if found:
            yield ok("metrics", f"for advisory pools: {', '.join(sorted(found))}")
        else:
            hint = "install KEDA, or an adapter for external metrics: docs/kubernetes.md#advisory-mode"
            yield fail("metrics", "pools are advisory, and neither external.metrics.k8s.io nor keda.sh is served", hint)


async def _nodes(api: KubernetesApi, use: ClusterUse) -> AsyncIterator[Finding]:
    nodes = (await api.request("GET", "/api/v1/nodes")).get("items") or []
    usable = [node for node in nodes if is_ready(node)]
    if not usable:
        yield fail("nodes", f"none of {len(nodes)} is ready", "kubectl describe nodes")
        return
    yield ok("nodes", f"{len(usable)} of {len(nodes)} are ready")
    unzoned = [
        node["metadata"]["name"] for node in usable if use.zone_key not in (node["metadata"].get("labels") or {})
    ]
    if unzoned:
        hint = "label them, or set kubernetes.zone_key: without a zone replicas are not spread over zones"
        yield warn("zones", f"{len(unzoned)} without {use.zone_key}, such as {unzoned[0]}", hint)
    else:
        zones = {node["metadata"]["labels"][use.zone_key] for node in usable}
        yield ok("zones", f"{len(zones)}: {', '.join(sorted(zones))}")
    if use.gpu_resource:
        gpus = sum(_quantity(node, use.gpu_resource) for node in usable)
        if gpus:
            yield ok("gpus", f"{gpus} of {use.gpu_resource}")
        else:
            hint = "install the device plugin, or let an autoscaler add such nodes"
            yield fail("gpus", f"pools ask for GPUs, and no node has {use.gpu_resource}", hint)


def _quantity(node: Object, resource: str) -> int:
    found = ((node.get("status") or {}).get("allocatable") or {}).get(resource, "0")
    return int(found) if str(found).isdigit() else 0


async def _secret(api: KubernetesApi, use: ClusterUse) -> AsyncIterator[Finding]:
    if not use.secret:
        return
    try:
        found = await api.request("GET", f"/api/v1/namespaces/{api.namespace}/secrets/{use.secret}")
    except OrchestratorError as error:
        if error.reason != "NotFound":
            yield warn("secret", f"{use.secret}: {error.message}", "whether it is there cannot be seen by this account")
            return
        found = {}
    if "gateway-secret" in (found.get("data") or {}):
        yield ok("secret", f"{use.secret} has gateway-secret")
    else:
        hint = f"kubectl create secret generic {use.secret} --from-literal=gateway-secret=…"
        yield fail("secret", f"no Secret {use.secret} with gateway-secret in {api.namespace}", hint)


async def _installed(api: KubernetesApi, use: ClusterUse) -> AsyncIterator[Finding]:
    """Pods of the chart: which are ready, and whether all are of one version. Those that have ended, such as that of
    `helm test`, are left out."""
    path = f"/api/v1/namespaces/{api.namespace}/pods"
    pods = (await api.request("GET", path, query={"labelSelector": _INSTALLED})).get("items") or []
    total, ready, images = Counter[str](), Counter[str](), set[str]()
    for pod in pods:
        if has_ended(pod):
            continue
        component = (pod["metadata"].get("labels") or {}).get(_COMPONENT, "pod")
        total[component] += 1
        ready[component] += is_ready(pod)
        images.add(pod["spec"]["containers"][0].get("image", ""))
    for component, number in sorted(total.items()):
        says = f"{component}: {ready[component]} of {number} pods are ready"
        yield ok("pods", says) if ready[component] == number else warn("pods", says, "kubectl describe pods")
    if len(images) > 1:
        yield warn("versions", f"pods run {', '.join(sorted(images))}", "fine for a while, as in an upgrade")
    elif images:
        yield ok("versions", f"all pods run {images.pop()}")


async def _replicas(api: KubernetesApi, use: ClusterUse) -> AsyncIterator[Finding]:
    for pool in use.pools:
        path = f"/api/v1/namespaces/{pool.namespace or api.namespace}/pods"
        pods = (await api.request("GET", path, query={"labelSelector": pool.selector})).get("items") or []
        if not pods:
            yield warn(
                "replica", f"{pool.name}: no pod has {pool.selector}", "is the selector right, and is one started?"
            )
        secret = os.environ.get(pool.settings.secret_env or "", "")
        for pod in pods:
            url, name = pod_url(pod, pool.port, pool.scheme), pod["metadata"]["name"]
            if not is_ready(pod) or not url:
                yield warn("replica", f"{name} ({pool.name}) is not ready", f"kubectl describe pod {name}")
                continue
            yield await asyncio.to_thread(_replica, pool, url, secret)


def _replica(pool: PodPool, url: str, secret: str) -> Finding:
    """Asks a replica at its pod's address, which may be of the cluster's own network."""
    parts = urlsplit(url)
    try:
        socket.create_connection((str(parts.hostname), parts.port or 80), _REACH_S).close()
    except OSError as error:
        hint = "from outside the cluster that may be as it should: run the doctor in a pod, too"
        return warn("replica", f"{url} ({pool.name}) cannot be reached: {error}", hint)
    return replica(pool.name, url, pool.settings, secret, pool.served_as)
