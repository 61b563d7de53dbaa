"""The usage ledger of one gateway: what finished requests used is on disk within a second, at no cost to them.

A thread writes what has gathered every half second, so that a gateway killed at any moment loses no usage older than
that and the write. While the store does not answer, usage is kept and tried again; a batch whose outcome is unknown is
simply written again, since every request is counted once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from penstock.core.errors import StoreUnavailable
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.usage import HOUR_S, Usage, UsageBook

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
MAX_PENDING = 500_000  # requests kept while the store is gone: some 200 MB


class Ledger:
    """`record` belongs to the thread that answers requests; the writing has a thread of its own."""

    def __init__(
        self,
        book: UsageBook,
        budgets: Budgets,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._book = book
        self._budgets = budgets
        self._interval_s = interval_s
        self._clock = clock
        self._gathered: deque[Usage] = deque()  # appended to by one thread while another takes from it
        self._unwritten: list[Usage] = []  # the writer's own
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage ledger", daemon=True)
        self._forget_at_s = 0.0
        self.num_written = 0  # requests whose usage the store has confirmed
        self.num_lost = 0  # requests whose usage could not be kept any longer

    def start(self) -> Ledger:
        self._budgets.load(self._book, now_s=self._clock())
        self._thread.start()
        return self

    def record(self, usage: Usage) -> None:
        self._gathered.append(usage)
        self._budgets.spend(usage)

    def close(self) -> None:
        """Write what is left, and stop."""
        self._stopping.set()
        self._thread.join()
        self._try_flush()

    def flush(self) -> None:
        """Write what has gathered, and learn what the other gateways' requests have spent. For the writing thread."""
        now_s = self._clock()
        self._unwritten += (self._gathered.popleft() for _ in range(len(self._gathered)))
        self._bound_unwritten()
        if self._unwritten:
            self._book.append(self._unwritten, now_s=now_s)
        written, self._unwritten = self._unwritten, []
        self.num_written += len(written)
        self._budgets.refresh(self._book, written, now_s=now_s)
        if now_s >= self._forget_at_s:
            self._book.forget_settled(now_s=now_s)
            self._forget_at_s = now_s + HOUR_S

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._try_flush()

    def _try_flush(self) -> None:
        try:
            self.flush()
        except StoreUnavailable as error:
            log.warning("usage of %d requests waits for the store: %s", len(self._unwritten), error.message)

    def _bound_unwritten(self) -> None:
        excess = len(self._unwritten) - MAX_PENDING
        if excess > 0:
            del self._unwritten[:excess]
            self.num_lost += excess
            log.error("the store has been gone for too long: usage of %d requests is lost", excess)

    def __enter__(self) -> Ledger:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
