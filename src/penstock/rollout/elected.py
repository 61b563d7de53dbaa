"""A thread in every gateway, of which one runs a rollout that no fleet's controller runs: the one with its lease.

Each model has a lease of its own, since gateways may have different models: a gateway without the versions of a
rollout does not know their replicas, and leaves the lease to those that have them. A rollout that none of these runs,
because there are none any more, is looked at now and then by any gateway, so that orders are obeyed and it can end.

Without a rollout the thread sleeps. A holder that dies is replaced after `LEASE_S`; rollouts stay as they are
meanwhile.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.core.errors import LeaseLost, ModelNotFound, StoreUnavailable
from penstock.core.rollout import RolloutOrder
from penstock.observe.background import Worker, count_error, outliving
from penstock.rollout.policy.state import PoolSeen
from penstock.rollout.runner import Capacity, RolloutRunner
from penstock.router.routes import pool_of
from penstock.tenancy.fleet import STATUS_STALE_S
from penstock.tenancy.lease import LeaseKeeper
from penstock.tenancy.rollouts import Rollout
from penstock.tenancy.store import Store

log = logging.getLogger(__name__)

LEASE_S = 4.0
EVERY_S = 1.0
PASSED_ROUNDS = 30  # in which a gateway leaves a rollout whose versions it does not have to those that have them
_NAME = "rollout runner"


def lease_of(model: str) -> str:
    """The name of the lease under which a rollout of this model is run."""
    return f"rollout of {model}"


class VersionsSeen(Protocol):
    """Versions as a gateway sees them; is asked on the runner's thread."""

    def has(self, model: str, version: str) -> bool:
        """Whether the version is in the gateway's configuration."""

    def num_ready(self, model: str, version: str) -> int | None:
        """Replicas that can answer it now; None: nobody knows."""


class _Turn:
    """The part of this gateway in the rollouts of one model."""

    def __init__(self, keeper: LeaseKeeper, runner: RolloutRunner) -> None:
        self.keeper = keeper
        self.runner = runner
        self.is_leading = False
        self.num_passed = 0  # rounds

    def leave(self) -> None:
        """Gives the lease back: another gateway goes on at once."""
        self.is_leading = False
        self.keeper.release()


class ElectedRunner:
    """Give it a store of its own. Works from `start` to `close`."""

    def __init__(
        self,
        store: Store,
        *,
        lease_s: float = LEASE_S,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timer`: a clock that never runs backwards."""
        self._store = store
        self._versions: VersionsSeen | None = None
        self._lease_s = lease_s
        self._every_s = every_s
        self._clock = clock
        self._timer = timer
        self._holder = secrets.token_hex(8)
        self._turns: dict[str, _Turn] = {}  # by model
        self._fleets: dict[str, str] = {}  # by pool that a controller sizes for rollouts
        self._over: list[Rollout] = []
        self._has_work = False
        self._woken = threading.Event()
        self._tell: Callable[[list[Rollout]], object] = lambda found: None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._worker: Worker | None = None

    def start(self, versions: VersionsSeen, tell: Callable[[list[Rollout]], object] = lambda found: None) -> None:
        """`tell` is told of all rollouts that the store keeps, on this thread: once, and as they change."""
        self._versions, self._tell = versions, tell
        self._woken.set()
        self._thread.start()
        self._worker = Worker(_NAME, self._thread.is_alive)

    def apply(self, orders: Iterable[RolloutOrder]) -> None:
        """Orders of all rollouts that are on, whenever one has changed."""
        self._has_work = any(True for _ in orders)
        self._woken.set()

    def close(self) -> None:
        """The leases are given back: another gateway goes on at once."""
        if self._worker is not None:
            self._worker.stop()
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        self._store.close()

    def _run(self) -> None:
        while True:
            if not self._has_work:
                self._woken.wait()
            if has_news := self._woken.is_set():
                self._woken.clear()  # before anything is read: what comes from now on wakes it again
            if self._stopping.is_set():
                break
            is_heard = False
            with outliving(_NAME):
                is_heard = self._step(has_news=has_news)
            if has_news and not is_heard:
                self._woken.set()  # the next step hears it, whether there is work or not
            self._stopping.wait(self._every_s)
        for turn in self._turns.values():
            turn.leave()

    def _step(self, *, has_news: bool) -> bool:
        """Whether the store answered to the end. `has_news`: a rollout may have begun or ended."""
        try:
            if has_news:
                self._over = [one for one in self._store.rollouts.all() if one.is_over]
            on = self._store.rollouts.on()
            self._tell([*on, *self._over])
            for model in self._turns.keys() - {one.model for one in on}:
                self._turns.pop(model).leave()
            if not on:
                return True
            now = self._clock()
            self._fleets = {
                one.pool: one.fleet
                for one in self._store.fleet.pools()
                if now - one.at < STATUS_STALE_S and one.residency is None
            }
            for rollout in on:
                try:
                    self._renew_leases()
                    self._take_turn(rollout)
                except StoreUnavailable:
                    raise
                except Exception as error:  # one that cannot be run is in no other's way
                    count_error(_NAME, error)
        except StoreUnavailable as error:
            log.warning("rollouts stay as they are: %s", error.message)
            return False
        return True

    def _renew_leases(self) -> None:
        """A rollout that takes long, as one that is taken over, costs no other its lease."""
        for turn in self._turns.values():
            if turn.is_leading:
                try:
                    turn.keeper.renew()
                except LeaseLost:
                    turn.is_leading = False

    def _take_turn(self, rollout: Rollout) -> None:
        """Runs it if it is this gateway's to run."""
        turn = self._turns.get(rollout.model)
        if turn is None:
            keeper = LeaseKeeper(self._store.fleet, lease_of(rollout.model), self._holder, self._lease_s, self._timer)
            runner = RolloutRunner(self._store, keeper.fenced, self._capacity, self._clock, self._timer)
            turn = self._turns[rollout.model] = _Turn(keeper, runner)
        try:
            is_others = self._is_of_fleet(rollout)
            if is_others or self._is_for_another(rollout):
                turn.num_passed += 1
                if turn.is_leading:
                    turn.leave()
                if is_others or turn.num_passed < PASSED_ROUNDS:
                    return
                if self._look(turn, rollout):
                    turn.leave()
            else:
                self._look(turn, rollout)
            turn.num_passed = 0
        except LeaseLost:
            turn.is_leading = False
        except StoreUnavailable:
            turn.is_leading = turn.is_leading and turn.keeper.is_held
            raise

    def _look(self, turn: _Turn, rollout: Rollout) -> bool:
        """Whether this gateway has the lease."""
        if not turn.is_leading:
            if not turn.keeper.try_take():
                return False
            turn.is_leading = True
            log.info("this gateway runs the rollout of %s, which no fleet runs", rollout.model)
        with turn.keeper.fenced():
            pass  # a round that writes nothing renews the lease, too
        turn.runner.step([rollout])
        return True

    def _is_of_fleet(self, rollout: Rollout) -> bool:
        """Whether a controller sizes both pools, and runs it."""
        fleets = [self._fleets.get(pool_of(rollout.model, version)) for version in (rollout.old, rollout.new)]
        return fleets[0] is not None and fleets[0] == fleets[1]

    def _is_for_another(self, rollout: Rollout) -> bool:
        """Whether other gateways have versions of it that this one has not."""
        assert self._versions is not None
        missing = [one for one in (rollout.old, rollout.new) if not self._versions.has(rollout.model, one)]
        if not missing:
            return False
        try:
            declared = self._store.routes.show(rollout.model).declared.weights
        except ModelNotFound:
            return True
        return any(one in declared for one in missing)

    def _capacity(self, rollout: Rollout) -> Capacity:
        versions = self._versions
        assert versions is not None
        old, new = (PoolSeen(versions.num_ready(rollout.model, one)) for one in (rollout.old, rollout.new))
        return Capacity(old, new)
