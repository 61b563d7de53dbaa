"""Objects of a Kubernetes cluster as they are now: listed once, then followed by a watch (an informer).

A watch that ends is resumed from the last version seen. A version that the server no longer has (410, Expired) is
listed again. All that was known stays while the server cannot be reached, and `failure` says since when it may be old.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from penstock.core.errors import OrchestratorError
from penstock.http import clock as clocks
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.kubernetes_api import KubernetesApi, Object
from penstock.observe.background import Worker, outliving

log = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.25
_MAX_WAIT_S = 15.0
_LONG_S = 5.0  # a watch that has lived for so long was no failure
_PAGE = "500"
_MAX_REMOVED = 256  # uids of objects that are gone, which a late answer must not bring back


class KubernetesWatch:
    """Belongs to the event loop, from `start` to `close`."""

    def __init__(
        self,
        api: KubernetesApi,
        path: Callable[[], str],
        selector: str = "",
        *,
        changed: Callable[[], None] = lambda: None,
        clock: TimerClock = LOOP_CLOCK,
    ) -> None:
        """`path`: of the collection, asked for when the cluster is known. `selector`: of labels."""
        self._api = api
        self._path = path
        self._selector = {"labelSelector": selector} if selector else {}
        self._changed = changed
        self._clock = clock
        self._wait_s = 0.0
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        self._removed: deque[str] = deque(maxlen=_MAX_REMOVED)
        self.objects: dict[str, Object] = {}  # by uid
        self.failure: OrchestratorError | None = None  # why what is known may be old; None: it is not

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._worker = Worker.of_task("Kubernetes watch", self._task)

    async def current(self) -> dict[str, Object]:
        """The objects. Raises OrchestratorError while they may be old."""
        self.start()
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure
        return self.objects

    def put(self, one: Object) -> None:
        """An object that the server has answered with: the watch tells it later, or has already."""
        uid = one["metadata"]["uid"]
        known = self.objects.get(uid)
        if uid not in self._removed and (known is None or _version(known) < _version(one)):
            self.objects[uid] = one

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        self.stop()
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        version: str | None = None
        while True:
            with outliving("Kubernetes watch"):
                began_s = self._clock.now()
                try:
                    version = version or await self._list()
                    version = await self._follow(version)
                    if self._clock.now() - began_s >= _LONG_S:
                        self._wait_s = 0.0
                except OrchestratorError as error:
                    if error.reason == "Expired":
                        version = None
                    else:
                        self._fail(error)
                await self._pause()

    async def _list(self) -> str:
        await self._api.connect()
        found: dict[str, Object] = {}
        page: dict[str, str] = {"limit": _PAGE}
        while True:
            listed = await self._api.request("GET", self._path(), query={**self._selector, **page})
            found |= {one["metadata"]["uid"]: one for one in listed.get("items") or ()}
            metadata = listed.get("metadata") or {}
            if not metadata.get("continue"):
                break
            page = {"limit": _PAGE, "continue": metadata["continue"]}
        self.objects = found
        self._succeed()
        self._changed()
        return str(metadata.get("resourceVersion") or "0")

    async def _follow(self, version: str) -> str:
        """Returns the version up to which everything is known, when the watch has ended."""
        async for event in self._api.watch(self._path(), {**self._selector, "resourceVersion": version}):
            if not event:
                self._succeed()
                continue
            one = event["object"]
            version = one["metadata"].get("resourceVersion") or version
            match event["type"]:
                case "ADDED" | "MODIFIED":
                    self.objects[one["metadata"]["uid"]] = one
                case "DELETED":
                    self.objects.pop(one["metadata"]["uid"], None)
                    self._removed.append(one["metadata"]["uid"])
                case _:
                    continue
            self._wait_s = 0.0
            self._changed()
        return version

    def _succeed(self) -> None:
        if self.failure is not None:
            log.info("Kubernetes answers again")
        self.failure = None
        self._settled.set()

    def _fail(self, error: OrchestratorError) -> None:
        if self.failure is None:
            log.warning("%s is not known any more, and stays as it was: %s", self._path(), error.message)
        self.failure = error
        self._settled.set()

    async def _pause(self) -> None:
        """A wait that doubles, so that nothing that fails or ends at once is tried in a hot loop."""
        wait_s, self._wait_s = self._wait_s, min(max(2 * self._wait_s, _FIRST_WAIT_S), _MAX_WAIT_S)
        await clocks.sleep(self._clock, wait_s)


def _version(one: Object) -> int:
    """Versions are opaque by contract and numbers by fact; one that is not is older than any."""
    with suppress(ValueError, TypeError):
        return int(one["metadata"].get("resourceVersion"))
    return -1
