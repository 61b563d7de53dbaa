"""The lease: of several processes that could do a thing, such as the controllers of one fleet, one does it.

A holder renews by raising a counter in the store. Another process takes over when the counter has stood still for
`lease_s` by its own clock, so that clocks of machines need not agree. Everything the holder writes is fenced by the
lease's epoch: one that was paused, and has been replaced, writes nothing more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from penstock.core.errors import LeaseLost, StoreUnavailable
from penstock.tenancy.database import Execute
from penstock.tenancy.fleet import FleetBook, Lease


class LeaseKeeper:
    """Blocks: for threads."""

    def __init__(
        self,
        book: FleetBook,
        name: str,
        holder: str,
        lease_s: float,
        clock: Callable[[], float],
        *,
        is_alone: bool = False,
    ) -> None:
        """`clock`: one that never runs backwards. `is_alone`: whoever held it before is known to be gone."""
        self._is_alone = is_alone
        self._book = book
        self._name = name
        self._holder = holder
        self._lease_s = lease_s
        self._clock = clock
        self._seen: Lease | None = None
        self._seen_at = 0.0
        self._lease: Lease | None = None
        self._renewed_at = 0.0

    def try_take(self) -> bool:
        """Whether this process acts from now on."""
        found, now = self._book.lease(self._name), self._clock()
        if found != self._seen:
            self._seen, self._seen_at = found, now
        is_mine = found is None or found.holder in ("", self._holder)  # nobody's is mine to take
        if not is_mine and not self._is_alone and now - self._seen_at < self._lease_s:
            return False
        self._lease = self._book.take_lease(self._name, self._holder, found)
        self._renewed_at = now
        return self._lease is not None

    @property
    def is_held(self) -> bool:
        """Whether no other process can have taken it."""
        return self._lease is not None and self._clock() - self._renewed_at < self._lease_s

    @contextlib.contextmanager
    def fenced(self) -> Iterator[Execute]:
        """A transaction of the leader, which renews the lease. Raises LeaseLost, also when the store has not been
        reached for so long that another may have taken over; nothing is written then."""
        now, lease = self._clock(), self._lease
        if lease is None or not self.is_held:
            raise LeaseLost("the lease has expired")
        with self._book.fenced(self._name, lease) as execute:
            yield execute
        self._renewed_at = now

    def renew(self) -> None:
        """Renews the lease if a quarter of it is over. Raises LeaseLost."""
        if self._clock() - self._renewed_at >= self._lease_s / 4:
            with self.fenced():
                pass

    def release(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            with contextlib.suppress(StoreUnavailable):  # it expires
                self._book.release_lease(self._name, lease)
