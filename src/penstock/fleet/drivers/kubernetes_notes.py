"""Labels and annotations by which a cluster shows what the controller knows: a replica's state, and what it holds.

`kubectl get pods -L penstock.dev/state` shows the former. The latter is `controller.kubernetes.io/pod-deletion-cost`:
a ReplicaSet that is scaled down ends the pods first whose loss costs least. Patches are few: a state when it changes, a
cost when it has doubled or halved, and no pod's more often than every half minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.core.errors import OrchestratorError
from penstock.fleet.drivers.driver import ReplicaNote
from penstock.http.kubernetes_api import KubernetesApi, Object
from penstock.http.kubernetes_watch import KubernetesWatch

STATE_LABEL = "penstock.dev/state"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_COST_EVERY_S = 30.0
_MAX_COST = 2**31 - 1

log = logging.getLogger(__name__)


class PodNotes:
    """Belongs to the event loop. A patch that fails is tried again with the next round."""

    def __init__(self, api: KubernetesApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._priced_at: dict[str, float] = {}  # by uid
        self._is_forbidden = False

    def show(
        self, pods: list[tuple[Object, KubernetesWatch, ReplicaNote]], *, has_cost: Callable[[Object], bool]
    ) -> None:
        """Begins the patches that are due, unless others are still under way. `has_cost`: whether something else may
        choose the pod to end."""
        if self._is_forbidden or (self._task is not None and not self._task.done()):
            return
        self._priced_at = {pod["metadata"]["uid"]: at for pod, _, _ in pods if (at := self._priced_at.get(_uid(pod)))}
        due = [(pod, watch, patch) for pod, watch, note in pods if (patch := self._patch(pod, note, has_cost(pod)))]
        if due:
            self._task = asyncio.get_running_loop().create_task(self._write(due))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _patch(self, pod: Object, note: ReplicaNote, has_cost: bool) -> Object | None:
        labels, annotations = pod["metadata"].get("labels") or {}, pod["metadata"].get("annotations") or {}
        patch: Object = {}
        if labels.get(STATE_LABEL) != note.state:
            patch["labels"] = {STATE_LABEL: note.state}
        cost, now = deletion_cost(note), self._clock()
        is_due = now - self._priced_at.get(_uid(pod), -_COST_EVERY_S) >= _COST_EVERY_S
        if has_cost and is_due and annotations.get(DELETION_COST, "0") != cost:
            patch["annotations"] = {DELETION_COST: cost}
            self._priced_at[_uid(pod)] = now
        return {"metadata": patch} if patch else None

    async def _write(self, due: list[tuple[Object, KubernetesWatch, Object]]) -> None:
        for pod, watch, patch in due:
            metadata = pod["metadata"]
            path = f"/api/v1/namespaces/{metadata.get('namespace') or self._api.namespace}/pods/{metadata['name']}"
            try:
                watch.put(await self._api.merge(path, patch))
            except OrchestratorError as error:
                self._is_forbidden = error.reason == "Forbidden"
                if self._is_forbidden:
                    log.warning("pods get no labels: %s", error.message)
                if error.reason != "NotFound":
                    return


def deletion_cost(note: ReplicaNote) -> str:
    """The tokens that a replica holds, as a power of two: only what has doubled or halved is worth a request."""
    return str(min(1 << (note.tokens_held.bit_length() - 1), _MAX_COST) if note.tokens_held > 0 else 0)


def _uid(pod: Object) -> str:
    return str(pod["metadata"]["uid"])
