"""Settings of replicas as pods of a Kubernetes cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.core.settings import Count, setting
from penstock.core.slo import Seconds
from penstock.http.kubernetes_api import ClusterSettings

_OF_THE_CLUSTER = ("kubeconfig", "context", "namespace")


@dataclass(frozen=True)
class KubernetesSettings(ClusterSettings):
    """Every pod of the fleet; a pool may have some of them otherwise."""

    image: str = setting("", "container image with penstock in it")
    command: list[str] = field(
        default_factory=lambda: ["penstock"],
        metadata={"help": "what the container runs; `engine` and its flags are added"},
    )
    service_account: str | None = setting(None, "of the pods; auto: the namespace's default, without its token")
    secret: str = setting(
        "penstock-replicas",
        "name of the Secret with `gateway-secret`, and if wanted `metrics-token`; the controller has the former in "
        "PENSTOCK_GATEWAY_SECRET",
    )
    port: Annotated[int, Meta(ge=1, le=65535)] = setting(8000, "port that replicas listen on")
    resources: dict[str, Any] = setting({}, "requests and limits of the container; GPUs are added by `gpus`")
    gpu_resource: str = setting("nvidia.com/gpu", "name of the resource that a pool's `gpus` are asked for by")
    zone_key: str = setting("topology.kubernetes.io/zone", "label of nodes that names their zone")
    node_selector: dict[str, str] = setting({}, "labels that a node must have")
    tolerations: list[dict[str, Any]] = setting([], "taints that the pods tolerate")
    spot_node_selector: dict[str, str] = setting({}, "labels of nodes of spot capacity, besides `node_selector`")
    spot_tolerations: list[dict[str, Any]] = setting([], "taints of such nodes, besides `tolerations`")
    cache_volume: dict[str, Any] | None = setting(
        None, "a volume for the weights, such as {hostPath: {path: …}} or {persistentVolumeClaim: {claimName: …}}"
    )
    template: dict[str, Any] = setting(
        {}, "metadata and spec of a pod, merged over ours; what has a name in a list is merged by it"
    )
    pre_stop_s: Annotated[int, Meta(ge=0)] = setting(
        5, "between the decision to end a pod and SIGTERM: gateways have heard of it by then"
    )
    unschedulable_s: Seconds = setting(
        120.0, "how long a pod may wait for a node, as a cluster autoscaler adds one; then there is no capacity"
    )
    node_drain_s: Seconds = setting(
        600.0, "how long replicas have on a node that is cordoned, or tainted without a time"
    )
    nodes: Count = setting(1, "nodes of one replica; more than one: a LeaderWorkerSet")
    selector: str = setting("", "advisory pools: label selector of the pods that something else scales")

    def of_pool(self, name: str, own: dict[str, Any]) -> KubernetesSettings:
        """These, with a pool's own over them. Raises ConfigError."""
        where = f"pools.{name}.kubernetes."
        for key in _OF_THE_CLUSTER:
            if key in own:
                raise ConfigError(f"a fleet's pods are in one namespace of one cluster: '{key}'", param=where + key)
        built = build(KubernetesSettings, own, where=where)
        return replace(self, **{key: getattr(built, key) for key in own})
