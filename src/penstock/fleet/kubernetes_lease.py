"""The fleet's lease as a Lease of Kubernetes (coordination.k8s.io/v1), beside the store's.

Of several controllers, the one that the Lease names acts; `kubectl get lease` shows which. It takes the store's lease
too, without a wait, so that what a replaced controller still writes is refused. For that reason a leader may go on
while the API server is away: nobody can have replaced it whose word is not in the store. As there, expiry is judged by
the watcher's own clock, from when the Lease was last seen to change; time in which nobody could look does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

from penstock.core.errors import LeaseLost, OrchestratorError
from penstock.http.kubernetes_api import UNREACHABLE, KubernetesApi, Object
from penstock.tenancy.database import Execute
from penstock.tenancy.fleet import FleetBook
from penstock.tenancy.lease import LeaseKeeper

log = logging.getLogger(__name__)

T = TypeVar("T")
_RENEWALS = 3  # in the time that a lease lasts


class KubernetesLeaseKeeper(LeaseKeeper):
    """Blocks: for threads other than that of the event loop in which `api` is used."""

    def __init__(
        self,
        api: KubernetesApi,
        object_name: str,
        book: FleetBook,
        name: str,
        holder: str,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Belongs to the running event loop. `object_name`: of the Lease; the others as of `LeaseKeeper`."""
        super().__init__(book, name, holder, lease_s, clock, is_alone=True)
        self._api = api
        self._object_name = object_name
        self._loop = asyncio.get_running_loop()
        self._seen_version, self._changed_at = "", 0.0
        self._object: Object | None = None  # the Lease as this controller last wrote it; None: it is not the holder
        self._tried_at = -math.inf  # to renew it
        self._is_silent = False  # the API server, as was told

    def try_take(self) -> bool:
        try:
            is_taken = self._wait(self._hold())
        except OrchestratorError as error:
            self._tell(error)
            self._seen_version = ""
            return False
        self._tell(None)
        return is_taken and super().try_take()

    @contextlib.contextmanager
    def fenced(self) -> Iterator[Execute]:
        if self.is_held and (now := self._clock()) - self._tried_at >= self._lease_s / _RENEWALS:
            self._tried_at = now
            try:
                self._wait(self._renew())
                self._tell(None)
            except OrchestratorError as error:
                self._tell(error)
        with super().fenced() as execute:
            yield execute

    def release(self) -> None:
        super().release()
        with contextlib.suppress(OrchestratorError):  # it expires
            self._wait(self._give_back())

    def _tell(self, error: OrchestratorError | None) -> None:
        """Logs that the Lease cannot be reached, once."""
        if error is not None and not self._is_silent:
            log.warning("the Lease cannot be reached, and the leader stays who it is: %s", error.message)
        self._is_silent = error is not None

    # -- in the event loop

    async def _hold(self) -> bool:
        """Whether the Lease names this controller from now on."""
        now = self._clock()
        try:
            found = await self._request("GET", self._object_name)
        except OrchestratorError as error:
            if error.reason != "NotFound":
                raise
            found = {"metadata": {"name": self._object_name}, "spec": {}}
        version, spec = found["metadata"].get("resourceVersion", ""), found.get("spec") or {}
        if version != self._seen_version:
            self._seen_version, self._changed_at = version, now
        lease_s = max(self._lease_s, float(spec.get("leaseDurationSeconds") or 0))
        is_mine = spec.get("holderIdentity") in (None, "", self._holder)
        if not is_mine and now - self._changed_at < lease_s:
            return False
        own = self._spec() | {
            "acquireTime": _now(),
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1,
        }
        self._tried_at = now
        return await self._write(found | {"spec": own})

    async def _renew(self) -> None:
        """Raises LeaseLost where another controller has it."""
        known = self._object
        if known is None:
            raise LeaseLost("the lease has expired")
        if await self._write(known | {"spec": known["spec"] | self._spec()}):
            return
        found = await self._request("GET", self._object_name)  # an operator may have written to it
        is_mine = (found.get("spec") or {}).get("holderIdentity") == self._holder
        if not is_mine or not await self._write(found | {"spec": found["spec"] | self._spec()}):
            self._object = None
            raise LeaseLost("another controller has the Lease")

    async def _give_back(self) -> None:
        known, self._object = self._object, None
        if known is not None:
            with contextlib.suppress(OrchestratorError):
                spec = known["spec"] | {"holderIdentity": "", "renewTime": _now()}
                await self._request("PUT", self._object_name, known | {"spec": spec})
        await self._api.close()

    async def _write(self, lease: Object) -> bool:
        """Whether nobody was faster."""
        manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease}
        is_new = "resourceVersion" not in lease["metadata"]
        try:
            self._object = await self._request(*(("POST", "") if is_new else ("PUT", self._object_name)), manifest)
        except OrchestratorError as error:
            if error.reason in ("AlreadyExists", "Conflict", "NotFound"):
                return False
            raise
        return True

    async def _request(self, method: str, name: str, body: Object | None = None) -> Object:
        await self._api.connect()
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self._api.namespace}/leases"
        return await self._api.request(method, f"{path}/{name}" if name else path, body=body)

    def _spec(self) -> Object:
        return {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": math.ceil(self._lease_s),
            "renewTime": _now(),
        }

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result. One that takes too long is as good as none."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(self._lease_s / _RENEWALS)
        except TimeoutError:
            future.cancel()
            raise OrchestratorError("Kubernetes does not answer", reason=UNREACHABLE) from None


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
