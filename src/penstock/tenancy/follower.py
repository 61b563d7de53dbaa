"""A thread that keeps a gateway's view of tenants, keys, admins, routes, replicas and rollouts as new as the store.

It hands every change on, in order; the gateway passes it on to its event loop. When the store does not answer,
what was known stays in force and the thread tries again. A tenant that cannot be read is closed (`store`), and the
others follow on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from types import TracebackType

from penstock.core.errors import StoreUnavailable
from penstock.core.rollout import RolloutOrder
from penstock.observe.background import Worker, outliving
from penstock.tenancy.admins import AdminKey
from penstock.tenancy.keys import TenantState
from penstock.tenancy.replicas import ReplicaRow
from penstock.tenancy.routes import RouteRevision
from penstock.tenancy.store import Store

log = logging.getLogger(__name__)

_WAIT_S = 0.2  # for news, before a look at whether to stop
_RETRY_S = 1.0
_NAME = "tenant follower"


class Follower:
    """Give it a store of its own: one that a ledger is writing through would let it wait."""

    def __init__(
        self,
        store: Store,
        apply: Callable[[Iterable[TenantState]], object],
        apply_admins: Callable[[Iterable[AdminKey]], object] = lambda _: None,
        apply_routes: Callable[[Iterable[RouteRevision]], object] = lambda _: None,
        apply_replicas: Callable[[Iterable[ReplicaRow]], object] = lambda _: None,
        apply_rollouts: Callable[[Iterable[RolloutOrder]], object] = lambda _: None,
        *,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._store = store
        self._apply = apply
        self._apply_admins = apply_admins
        self._apply_routes = apply_routes
        self._apply_replicas = apply_replicas
        self._apply_rollouts = apply_rollouts
        self._retry_s = retry_s
        self._revision = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._worker: Worker | None = None

    def start(self) -> Follower:
        """Everything there is has been handed over when this returns; what follows comes from the thread."""
        self._catch_up()
        self._thread.start()
        self._worker = Worker(_NAME, self._thread.is_alive)
        return self

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with outliving(_NAME):
                try:
                    self._follow()
                except StoreUnavailable as error:
                    log.warning("tenants and keys stay as they were last known: %s", error.message)
            self._stopping.wait(self._retry_s)

    def _follow(self) -> None:
        with self._store.watch() as watch:
            while not self._stopping.is_set():
                self._catch_up()  # before the first wait too: something may have come before the watch
                while not (watch.wait(_WAIT_S) or self._stopping.is_set()):
                    pass

    def _catch_up(self) -> None:
        changes = self._store.changes(self._revision)
        if changes.routes:
            self._apply_routes(changes.routes)
        if changes.replicas is not None:
            self._apply_replicas(changes.replicas)
        if changes.rollouts is not None:
            self._apply_rollouts(changes.rollouts)
        if changes.admins is not None:
            self._apply_admins(changes.admins)
        if changes.tenants:  # the last: whoever is known meets all that was there before it
            self._apply(changes.tenants)
        self._revision = changes.revision

    def __enter__(self) -> Follower:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
