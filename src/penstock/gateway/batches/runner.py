"""The runner of batches: claims them, runs their rows through the gateway, and writes what comes of them.

A gateway looks for batches that nobody runs, takes a lease on them and renews it; what one leaves when it is killed,
another finds when the lease has run out, and goes on with at the first row that has no result. A gateway that is
stopped gives its batches back at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol
from uuid import uuid4

from penstock.core.errors import PenstockError
from penstock.gateway.batches.file_store import FileStore
from penstock.gateway.batches.run import BatchRun, RunServices
from penstock.gateway.batches.settings import BatchSettings
from penstock.gateway.batches.slots import RowSlots
from penstock.gateway.batches.spare import Seen
from penstock.http import clock as clocks
from penstock.http.clock import TimerClock
from penstock.http.exchange import Exchange
from penstock.observe.background import outliving
from penstock.tenancy.batches import BatchBook, Lease, StoredBatch
from penstock.tenancy.keys import Caller
from penstock.tenancy.usage import Recorder

_RENEWALS = 3  # of a lease before it ends
_LOOKS = 6  # for batches that nobody runs, in the time of a lease
SWEEP_EVERY_S = 600.0
TICK_S = 0.25

log = logging.getLogger(__name__)


class RowGate(Protocol):
    """The way of a row into the gateway."""

    def caller(self, tenant_id: str, key_id: str) -> Caller | None:
        """Whose rows these are, in the lowest class; None: the tenant is gone. Raises PermissionDenied where it is not
        active."""

    def pool(self, model: str, caller: Caller) -> str:
        """The pool that requests for a model go to. Raises ModelNotFound."""

    def look(self, pool: str) -> Seen: ...

    def begin(self, exchange: Exchange, row_id: str, caller: Caller, ledger: Recorder) -> None:
        """Lets a row in as if a client had sent it, but that its usage is told to `ledger`."""


class BatchRunner:
    def __init__(
        self,
        book: BatchBook,
        files: FileStore,
        settings: BatchSettings,
        clock: TimerClock,
        wall: Callable[[], float],
    ) -> None:
        """`wall`: the time of the store."""
        self._book = book
        self._files = files
        self._settings = settings
        self._clock = clock
        self._wall = wall
        self._lease_s = settings.lease_s
        self._owner = uuid4().hex
        self._running: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self.slots: RowSlots | None = None
        self.ended: Counter[str] = Counter()  # batches, by status
        self.rows: Counter[str] = Counter()  # by outcome
        self.num_retries = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self, gate: RowGate) -> None:
        slots = self.slots = RowSlots(self._settings.max_in_flight, gate.look)
        self._services = RunServices(
            self._book, self._files, gate, slots, self._settings, self._clock, self._wall, self.rows, self._retried
        )
        for work in (self._claim(), self._renew(), self._tick(), self._sweep()):
            self._spawn(work)

    def close(self) -> None:
        """Rows in flight are given up, and others are written; what is left, another gateway may go on with at once."""
        for run in list(self._running.values()):
            run.close()
        for task in self._tasks:
            task.cancel()
        if self.slots is not None:
            self._files.soon(lambda: self._book.release(self._owner))

    def look_now(self) -> None:
        """There is a new batch."""
        self._news.set()

    def cancelled(self, batch_id: str) -> None:
        """A client has cancelled it; of one that another gateway runs, that gateway hears by itself."""
        if (run := self._running.get(batch_id)) is not None:
            run.stop("cancelled")
        self._news.set()

    # -- tasks that never end

    async def _claim(self) -> None:
        while True:
            self._news.clear()
            with outliving("batches"):
                while await self._claim_one():
                    pass
            timer = self._clock.call_later(self._lease_s / _LOOKS, self._news.set)
            await self._news.wait()
            timer.cancel()

    async def _claim_one(self) -> bool:
        if len(self._running) >= self._settings.max_running:
            return False
        owned = Counter(run.batch.tenant_id for run in self._running.values())
        busy = [tenant for tenant, count in owned.items() if 2 * count >= self._settings.max_running]
        try:
            batch = await self._files.blocking(self._book.claim, self._owner, self._lease_s, busy=busy)
        except PenstockError as error:
            log.warning("batches cannot be looked for: %s", error.message)
            return False
        if batch is None:
            return False
        if batch.epoch > 1:
            log.warning("batch %s is taken over, with %d of %d rows done", batch.id, batch.num_done, batch.num_rows)
        lease = Lease(batch.tenant_id, batch.id, self._owner, batch.epoch)
        self._running[batch.id] = run = BatchRun(self._services, batch, lease)
        self._spawn(self._run(run))
        return True

    async def _run(self, run: BatchRun) -> None:
        ended = None
        with outliving("batches"):
            ended = await run.run()
        self._running.pop(run.batch.id, None)
        self._news.set()  # there is room for another
        if ended is not None:
            self.ended[ended.status] += 1
            _say(ended)
        elif not run.is_lost:
            with outliving("batches"):
                await self._files.blocking(self._book.give_back, run.lease, self._lease_s)

    async def _renew(self) -> None:
        while True:
            await clocks.sleep(self._clock, self._lease_s / _RENEWALS)
            if not self._running:
                continue
            before = list(self._running)
            try:
                statuses = await self._files.blocking(self._book.renew, self._owner, before, self._lease_s)
            except PenstockError as error:
                log.warning("the leases of batches were not renewed: %s", error.message)
                continue
            for batch_id in before:
                if (run := self._running.get(batch_id)) is None:
                    continue
                if batch_id not in statuses:
                    run.stop("lost")
                elif statuses[batch_id] == "cancelling":
                    run.stop("cancelled")

    async def _tick(self) -> None:
        assert self.slots is not None
        while True:
            await clocks.sleep(self._clock, TICK_S)
            with outliving("batches"):
                self.slots.tick()
                now_s = self._wall()
                for run in list(self._running.values()):
                    if now_s >= run.batch.due_at:
                        run.stop("expired")

    async def _sweep(self) -> None:
        while True:
            await clocks.sleep(self._clock, SWEEP_EVERY_S)
            try:
                await self._files.blocking(self._book.sweep)
                await self._files.blocking(self._files.sweep)
            except PenstockError as error:
                log.warning("files that nobody keeps cannot be deleted: %s", error.message)

    def _retried(self) -> None:
        self.num_retries += 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _say(batch: StoredBatch) -> None:
    why = f": {batch.facts.errors[0].message}" if batch.facts.errors else ""
    log.info(
        "batch %s of tenant %s is %s: %d of %d rows completed, %d failed, %d cancelled, %d expired%.300s",
        batch.id,
        batch.tenant_id,
        batch.status,
        batch.completed,
        batch.num_rows,
        batch.failed,
        batch.cancelled,
        batch.expired,
        why,
    )
