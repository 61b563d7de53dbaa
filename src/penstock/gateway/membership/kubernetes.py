"""Replicas as pods of a Kubernetes cluster, by their labels: penstock's, or those of vLLM and others.

    kubernetes: [{selector: "app=vllm,model=m", namespace: prod, port: 8000, dialect: vllm}]

A pod that is ready is a replica. One that was, and is not any more or is told to end, drains: its streams go on. While
the API server cannot be reached, what was known stays. Needs no controller, and the extra `kubernetes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from penstock.core.config import build, within
from penstock.core.errors import ConfigError
from penstock.core.settings import Role, setting
from penstock.gateway.membership.member import Member
from penstock.gateway.settings.gateway import ModelSettings
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.kubernetes_api import ClusterSettings, KubernetesApi, Object, check_client
from penstock.http.kubernetes_objects import has_ended, is_leaving, is_ready, pod_url
from penstock.http.kubernetes_watch import KubernetesWatch

_ZONES = ("topology.kubernetes.io/zone", "penstock.dev/zone")
_Place = tuple[str | None, str]  # namespace and selector


@dataclass(frozen=True)
class PodQuery:
    selector: str = setting("", "label selector: app=vllm,model=m")
    namespace: str | None = setting(None, "namespace of the pods; auto: the gateway's `kubernetes.namespace`")
    port: int | str | None = setting(
        None, "number or name of the port; auto: the one called http or https, or the only one"
    )
    scheme: Literal["http", "https"] | None = setting(None, "auto: by the port's name, else http")
    dialect: str | None = setting(None, "of these pods; auto: the model's `dialect`")
    role: Role | None = setting(None, "of these pods; auto: the model's `role`")

    @staticmethod
    def parse(entry: Mapping[str, Any]) -> PodQuery:
        """Raises ConfigError."""
        with within("kubernetes."):
            query = build(PodQuery, entry)
            if not query.selector:
                raise ConfigError("pods are found by a label selector, such as app=vllm", param="selector")
        return query

    @property
    def place(self) -> _Place:
        return self.namespace, self.selector


class KubernetesSource:
    """Follows the pods of every selector, from the first one that a pool names to `close`."""

    name = "kubernetes"

    def __init__(self, cluster: ClusterSettings, clock: TimerClock = LOOP_CLOCK) -> None:
        self._cluster = cluster
        self._clock = clock
        self._api: KubernetesApi | None = None
        self._watches: dict[_Place, KubernetesWatch] = {}
        self._served: set[str] = set()  # uids of pods that were ready once
        self.changed: Callable[[], None] = lambda: None

    def members(self, pools: Mapping[str, ModelSettings]) -> Iterator[Member]:
        found = [(name, pool, PodQuery.parse(entry)) for name, pool in pools.items() for entry in pool.kubernetes]
        self._follow({query.place for _, _, query in found})
        for name, pool, query in found:
            settings = replace(pool, dialect=query.dialect or pool.dialect, role=query.role or pool.role)
            for pod in self._watches[query.place].objects.values():
                if (member := self._member(name, settings, query, pod)) is not None:
                    yield member
        known = {uid for watch in self._watches.values() for uid in watch.objects}
        self._served &= known

    async def close(self) -> None:
        for watch in self._watches.values():
            await watch.close()
        if self._api is not None:
            await self._api.close()

    def _follow(self, places: set[_Place]) -> None:
        if places and self._api is None:
            with within("kubernetes"):
                check_client()
            self._api = KubernetesApi(self._cluster)
        for gone in self._watches.keys() - places:
            self._watches.pop(gone).stop()
        for place in places - self._watches.keys():
            assert self._api is not None
            path = partial(_path, self._api, place[0])
            watch = KubernetesWatch(self._api, path, place[1], changed=self._changed, clock=self._clock)
            self._watches[place] = watch
            watch.start()

    def _changed(self) -> None:
        self.changed()

    def _member(self, name: str, pool: ModelSettings, query: PodQuery, pod: Object) -> Member | None:
        uid, url = pod["metadata"]["uid"], pod_url(pod, query.port, query.scheme)
        is_serving = is_ready(pod) and not is_leaving(pod)
        if is_serving:
            self._served.add(uid)
        if not url or has_ended(pod) or uid not in self._served:
            return None
        labels = pod["metadata"].get("labels") or {}
        zone = next((labels[key] for key in _ZONES if key in labels), pool.zone)
        return Member(name, url, replace(pool, zone=zone), is_draining=not is_serving)


def _path(api: KubernetesApi, namespace: str | None) -> str:
    return f"/api/v1/namespaces/{namespace or api.namespace}/pods"
