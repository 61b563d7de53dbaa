"""The usage ledger of one gateway: what finished requests used is on disk within a second, at no cost to them.

A thread writes what has gathered every half second. With a journal, a gateway killed at any moment loses no usage of a
request that has ended: the next one to start writes it; without, it loses what is not yet in the store. While the store
does not answer, usage is kept and tried again; a batch whose outcome is unknown is simply written again, since every
request is counted once. A record that the store cannot hold is set aside, named and counted; the others are written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from penstock.core.errors import StoreUnavailable
from penstock.observe.recurring import Recurring
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.journal import Journal
from penstock.tenancy.usage import HOUR_S, REMEMBER_S, Usage, UsageBook

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
MAX_PENDING = 500_000  # requests kept while the store is gone: some 200 MB


class Ledger(Recurring):
    """`record` belongs to the thread that answers requests; the writing has a thread of its own."""

    def __init__(
        self,
        book: UsageBook,
        budgets: Budgets,
        journal: Journal | None = None,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("usage ledger", interval_s)
        self._book = book
        self._budgets = budgets
        self._journal = journal
        self._clock = clock
        self._lock = threading.Lock()  # what is in the journal's current file is in `_gathered`, or was written since
        self._gathered: list[Usage] = []
        self._unwritten: list[Usage] = []  # the writer's own
        self._settled: list[Usage] = []  # the writer's own: in the store, and not yet told to the budgets
        self._forget_at_s = 0.0
        self.num_written = 0  # requests whose usage the store has confirmed
        self.num_lost = 0  # requests whose usage could not be kept any longer
        self.num_set_aside = 0  # records that the store cannot hold

    def start(self) -> Self:
        if self._journal is not None:
            self._recover(self._journal)
        self._budgets.load(self._book, now_s=self._clock())
        return super().start()

    def record(self, usage: Usage) -> None:
        with self._lock:
            if self._journal is not None:
                self._journal.append(usage)
            self._gathered.append(usage)
        self._budgets.spend(usage)

    def close(self) -> None:
        """Write what is left, and stop."""
        super().close()
        if self._journal is not None:
            self._journal.close()

    def lost(self) -> dict[str, int]:
        """Requests that nobody will be charged for, by reason."""
        return {"store_gone": self.num_lost, "set_aside": self.num_set_aside}

    def tick(self) -> None:
        try:
            self.flush()
        except StoreUnavailable as error:
            log.warning("usage of %d requests waits for the store: %s", len(self._unwritten), error.message)

    def flush(self) -> None:
        """Write what has gathered, and learn what the other gateways' requests have spent. For the writing thread."""
        now_s = self._clock()
        with self._lock:
            self._unwritten += self._gathered
            self._gathered = []
            if self._journal is not None:
                self._journal.switch()
        self._bound_unwritten()
        self._write(now_s)
        if self._journal is not None:
            self._journal.confirm()
        settled, self._settled = self._settled, []
        self._budgets.refresh(self._book, settled, now_s=now_s)
        if now_s >= self._forget_at_s:
            self._book.forget_settled(now_s=now_s)
            self._forget_at_s = now_s + HOUR_S

    def _write(self, now_s: float) -> None:
        """All that is unwritten. A batch that the store answers and does not take is halved until one record is left,
        which is to blame."""
        batches = [self._unwritten] if self._unwritten else []
        try:
            while batches:
                batch = batches[-1]
                try:
                    self._book.append(batch, now_s=now_s)
                except StoreUnavailable:
                    raise
                except Exception as error:  # whatever a record holds, the others are not to wait for it
                    batches.pop()
                    if len(batch) > 1:
                        batches += (batch[len(batch) // 2 :], batch[: len(batch) // 2])
                    else:
                        self._set_aside(batch[0], error)
                else:
                    batches.pop()
                    self._settled += batch
                    self.num_written += len(batch)
        finally:
            self._unwritten = [usage for batch in reversed(batches) for usage in batch]

    def _set_aside(self, usage: Usage, error: Exception) -> None:
        self.num_set_aside += 1
        log.error(
            "usage of request %.80r of tenant %.80r cannot be written and is set aside: %.300s",
            usage.request_id,
            usage.tenant_id,
            error,
        )

    def _recover(self, journal: Journal) -> None:
        """Usage that dead gateways recorded. The store knows for two days what it has; of older ones nobody can tell,
        and nothing is to be charged twice."""
        journal.open()
        now_s, found = self._clock(), journal.left_behind()
        self._unwritten = [usage for usage in found if usage.at_s > now_s - REMEMBER_S + HOUR_S]
        if too_old := len(found) - len(self._unwritten):
            self.num_lost += too_old
            log.error("usage of %d requests that a gateway left behind is too old to be charged once", too_old)
        self._write(now_s)
        if self._settled:
            log.warning("usage of %d requests that a gateway left behind is in the store now", len(self._settled))
        self._settled = []  # the budgets are loaded after this
        journal.clear()

    def _bound_unwritten(self) -> None:
        excess = len(self._unwritten) - MAX_PENDING
        if excess > 0:
            del self._unwritten[:excess]
            self.num_lost += excess
            log.error("the store has been gone for too long: usage of %d requests is lost", excess)
