"""A thread in every gateway, of which one runs the rollouts that no fleet's controller runs: the one with the lease.

Without a rollout it sleeps. A holder that dies is replaced after `LEASE_S`; rollouts stay as they are meanwhile.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable

from penstock.core.errors import LeaseLost, StoreUnavailable
from penstock.core.rollout import RolloutOrder
from penstock.observe.background import Worker, outliving
from penstock.rollout.policy.state import PoolSeen
from penstock.rollout.runner import Capacity, RolloutRunner
from penstock.router.routes import pool_of
from penstock.tenancy.fleet import STATUS_STALE_S
from penstock.tenancy.lease import LeaseKeeper
from penstock.tenancy.rollouts import Rollout
from penstock.tenancy.store import Store

log = logging.getLogger(__name__)

LEASE = "rollouts"
LEASE_S = 4.0
EVERY_S = 1.0
_NAME = "rollout runner"


class ElectedRunner:
    """Give it a store of its own. Works from `start` to `close`."""

    def __init__(
        self,
        store: Store,
        *,
        lease_s: float = LEASE_S,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._num_ready: Callable[[str, str], int] = lambda model, version: 0
        self._every_s = every_s
        self._clock = clock
        self._keeper = LeaseKeeper(store.fleet, LEASE, secrets.token_hex(8), lease_s, time.monotonic)
        self._runner = RolloutRunner(store, self._keeper.fenced, self._capacity, clock)
        self._fleets: dict[str, str] = {}  # by pool that a controller sizes for rollouts
        self._over: list[Rollout] = []
        self._has_work = False
        self._woken = threading.Event()
        self._tell: Callable[[list[Rollout]], object] = lambda found: None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._worker: Worker | None = None

    def start(
        self,
        num_ready: Callable[[str, str], int],
        tell: Callable[[list[Rollout]], object] = lambda found: None,
    ) -> None:
        """`num_ready`: replicas that can answer a version of a model now, counted on this thread. `tell` is told of all
        rollouts that the store keeps, on this thread: once, and as they change."""
        self._num_ready, self._tell = num_ready, tell
        self._woken.set()
        self._thread.start()
        self._worker = Worker(_NAME, self._thread.is_alive)

    def apply(self, orders: Iterable[RolloutOrder]) -> None:
        """Orders of all rollouts that are on, whenever one has changed."""
        self._has_work = any(True for _ in orders)
        self._woken.set()

    def close(self) -> None:
        """The lease is given back: another gateway goes on at once."""
        if self._worker is not None:
            self._worker.stop()
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        self._store.close()

    def _run(self) -> None:
        is_leading = False
        while True:
            if not self._has_work:
                self._woken.wait()
            has_news = self._woken.is_set()
            self._woken.clear()
            if self._stopping.is_set():
                break
            with outliving(_NAME):
                is_leading = self._step(is_leading, has_news=has_news)
            self._stopping.wait(self._every_s)
        self._keeper.release()

    def _step(self, is_leading: bool, *, has_news: bool) -> bool:
        """Whether this gateway has the lease. `has_news`: a rollout may have begun or ended."""
        try:
            if has_news:
                self._over = [one for one in self._store.rollouts.all() if one.is_over]
            self._tell([*self._store.rollouts.on(), *self._over])
            if not self._has_work:
                return is_leading and self._keeper.is_held
            if not is_leading:
                if not self._keeper.try_take():
                    return False
                self._runner.forget()
                log.info("this gateway runs the rollouts that no fleet runs")
            now = self._clock()
            self._fleets = {
                one.pool: one.fleet
                for one in self._store.fleet.pools()
                if now - one.at < STATUS_STALE_S and one.residency is None
            }
            with self._keeper.fenced():
                pass  # a round that writes nothing renews the lease, too
            self._runner.step()
            return True
        except LeaseLost:
            return False
        except StoreUnavailable as error:
            log.warning("rollouts stay as they are: %s", error.message)
            return is_leading and self._keeper.is_held

    def _capacity(self, rollout: Rollout) -> Capacity | None:
        fleets = [self._fleets.get(pool_of(rollout.model, version)) for version in (rollout.old, rollout.new)]
        if fleets[0] is not None and fleets[0] == fleets[1]:
            return None  # its controller sizes both pools, and runs it
        return Capacity(
            PoolSeen(self._num_ready(rollout.model, rollout.old)), PoolSeen(self._num_ready(rollout.model, rollout.new))
        )
