"""Pods and nodes as replicas: failures, and the signs that one is about to be taken away. Pure.

Kubernetes says in four places that a pod will go: its deletionTimestamp, its condition DisruptionTarget, a taint of its
node, and the node's `unschedulable`. Taints have the names that clouds and autoscalers give them.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.http.kubernetes_api import Object
from penstock.http.kubernetes_objects import condition, has_ended, is_leaving, spec_of, status_of

UNREACHABLE_S = 30.0
_TAINTS: Mapping[str, float | None] = {  # seconds from the taint to the node's end; None: as long as a drain may take
    "aws-node-termination-handler/spot-itn": 120.0,
    "aws-node-termination-handler/asg-lifecycle-termination": 120.0,
    "aws-node-termination-handler/scheduled-maintenance": None,
    "aws-node-termination-handler/rebalance-recommendation": None,
    "cloud.google.com/impending-node-termination": 15.0,
    "karpenter.sh/disrupted": None,
    "ToBeDeletedByClusterAutoscaler": None,
    "node.kubernetes.io/unschedulable": None,
    "node.kubernetes.io/unreachable": UNREACHABLE_S,
    "node.kubernetes.io/not-ready": UNREACHABLE_S,
    "node.kubernetes.io/out-of-service": 0.0,
}
_LOST = ("node.kubernetes.io/unreachable", "node.kubernetes.io/out-of-service")
_MAINTENANCE = "cloud.google.com/active-node-maintenance"
_CANNOT_START = (
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
)
_GRACE_S = 30.0


def failure(pod: Object) -> str:
    """Returns why the pod has ended, or will never run; empty: it may."""
    status = status_of(pod)
    containers = status.get("containerStatuses") or ()
    if has_ended(pod):
        ended = [one.get("state", {}).get("terminated") or {} for one in containers]
        codes = [f"exit code {one['exitCode']}" for one in ended if "exitCode" in one]
        words = [status.get("reason"), status.get("message"), *(one.get("message") for one in ended), *codes]
        said = ": ".join(dict.fromkeys(word.strip() for word in words if word))
        return f"its pod has ended: {said}" if said else "its pod has ended"
    for one in [*(status.get("initContainerStatuses") or ()), *containers]:
        waiting = one.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _CANNOT_START:
            return f"its pod cannot start: {waiting['reason']}: {waiting.get('message') or 'no reason given'}"
    return ""


def unschedulable(pod: Object) -> str:
    """Returns why no node takes the pod now; empty: one has, or nobody has looked yet."""
    found = condition(pod, "PodScheduled")
    if found.get("status") == "False" and found.get("reason") == "Unschedulable":
        return f"no node takes its pod: {found.get('message') or 'no reason given'}"
    return ""


def notice_s(pod: Object, node: Object | None, node_drain_s: float) -> float | None:
    """Seconds from the sign until the pod is taken away; None: nobody means to. A node that drains evicts its pods."""
    found = []
    if is_leaving(pod):
        found.append(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
    elif condition(pod, "DisruptionTarget").get("status") == "True":
        found.append(float(spec_of(pod).get("terminationGracePeriodSeconds") or _GRACE_S))
    if node is not None:
        for taint in spec_of(node).get("taints") or ():
            if taint["key"] in _TAINTS:
                seconds = _TAINTS[taint["key"]]
                found.append(node_drain_s if seconds is None else seconds)
        is_maintained = (node["metadata"].get("labels") or {}).get(_MAINTENANCE) == "ONGOING"
        if spec_of(node).get("unschedulable") or is_maintained:
            found.append(node_drain_s)
    return min(found, default=None)


def is_lost(node: Object | None) -> bool:
    """Whether nobody on the node can confirm that a pod has ended."""
    return node is None or any(taint["key"] in _LOST for taint in spec_of(node).get("taints") or ())
