"""One batch, run by the process that has its lease: validating, in progress, finalizing, and its end.

Rows are read in order, wait for a slot, and are tried until their answer is final. Answers gather and are written to
the store every fifth of a second with what they cost; results that fill a chunk become an object of the store of files.
A crash in between costs work, and changes no bill:

    answered, not written       neither result nor charge is there: the row is run again
    written                     result and charge are there, by one transaction
    object put, not noted       the results are still in the store: the next owner writes an object of its own
    noted                       the results are in the file
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

from penstock.api.batches import MESSAGES, AnthropicRows, BatchRow, OpenAIRows, RowWriter
from penstock.core.errors import LeaseLost, ModelNotFound, PenstockError, PermissionDenied, StoreCorrupt
from penstock.gateway.batches import input
from penstock.gateway.batches.file_store import CHUNK_BYTES, FileStore
from penstock.gateway.batches.row_exchange import Answer, RowTry
from penstock.gateway.batches.settings import BatchSettings
from penstock.gateway.batches.slots import RowSlots
from penstock.http import clock as clocks
from penstock.http.clock import TimerClock
from penstock.observe.background import count_error
from penstock.tenancy.batches import ERRORS, OUTPUT, BatchBook, DoneRow, Lease, RowError, StoredBatch

if TYPE_CHECKING:
    from penstock.gateway.batches.runner import RowGate

_WRITE_EVERY_S = 0.2
_MANY = 64  # rows that are written at once though it is early
_MAX_UNWRITTEN = 512  # rows that are answered; while there are so many no more are asked
_AGAIN_S = 1.0  # after the store did not answer
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_BUSY = (402, 429, 503, 529)  # not now: tried again until the window is over. 402: Anthropic's for a spent budget
_BROKEN = (408, 500, 502, 504)  # tried again a few times
_MAX_BROKEN = 5

P = ParamSpec("P")
T = TypeVar("T")
Stop = Literal["cancelled", "expired", "lost", "failed"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunServices:
    book: BatchBook
    files: FileStore
    gate: RowGate
    slots: RowSlots
    settings: BatchSettings
    clock: TimerClock
    wall: Callable[[], float]
    rows: Counter[str]
    retried: Callable[[], None]


class BatchRun:
    def __init__(self, services: RunServices, batch: StoredBatch, lease: Lease) -> None:
        self.batch = batch
        self._services = services
        self.lease = lease
        self._writer: RowWriter = AnthropicRows() if batch.facts.endpoint == MESSAGES else OpenAIRows()
        self._stopped: Stop | None = "cancelled" if batch.status == "cancelling" else None
        self._failure: RowError | None = None
        self._work: asyncio.Task[None] | None = None
        self._tries: set[RowTry] = set()
        self._done: list[DoneRow] = []  # and not written
        self._is_due = asyncio.Event()  # it is time to write
        self._is_over = False  # no more rows are answered
        self._tidied: set[str] = set()

    @property
    def is_lost(self) -> bool:
        """Whether it is another owner's."""
        return self._stopped == "lost"

    def stop(self, why: Stop) -> None:
        """No more of its rows are run, and those in flight are given up."""
        if self._stopped is None or why == "lost":
            self._stopped = why
            if self._work is not None:
                self._work.cancel()

    def close(self) -> None:
        """The process ends: what is answered is still written, in a thread."""
        self.stop("lost")
        for one in list(self._tries):
            one.exchange.cancel()
        done, self._done = self._done, []
        if done:
            self._services.files.soon(lambda: self._services.book.commit(self.lease, done))

    async def run(self) -> StoredBatch | None:
        """To its end; None: it is for another process to end it."""
        try:
            if self.batch.status in ("validating", "cancelling") and not self.batch.facts.output_file_id:
                ended = await self._validate()
                if ended is not None:
                    return ended
            if self.batch.status in ("in_progress", "cancelling"):
                await self._answer_rows()
                if self._stopped == "lost":
                    return None
                if self._stopped in ("cancelled", "expired") and self.batch.facts.output_file_id:
                    await self._close_rows(self._stopped)
                if self.batch.status == "in_progress" and self._stopped is None:
                    self.batch = await self._call(self._services.book.finalize, self.lease)
            return await self._finish()
        except LeaseLost as error:
            log.warning("%s", error.message)
        except StoreCorrupt as error:
            return await self._give_up("file_lost", error)
        except PenstockError as error:  # whoever has the next lease tries again
            count_error("batches", error)
            log.warning("batch %s stands still: %s", self.batch.id, error.message)
        return None

    # -- validating

    async def _validate(self) -> StoredBatch | None:
        """The batch in progress, in `self.batch`; or its end, if it cannot be run."""
        services, batch = self._services, self.batch
        file = await services.files.find(batch.tenant_id, batch.input_file_id)
        if file is None:
            return await self._call(
                services.book.end, self.lease, "failed", [RowError("file_not_found", "the input file is gone")]
            )
        endpoint = batch.facts.endpoint
        checked = await self._call(input.check, services.files, file, endpoint, services.settings.max_rows)
        errors = checked.errors or self._unknown_models(checked.models)
        if not errors:
            try:
                self.batch = await self._call(
                    services.book.begin,
                    self.lease,
                    num_rows=checked.num_rows,
                    limits=services.settings.batch_limits,
                    has_error_file=self._writer.has_error_file,
                )
                if self.batch.status == "cancelling":
                    self.stop("cancelled")
                return None
            except LeaseLost:
                raise
            except PenstockError as error:
                if error.code != "storage_quota_exceeded":
                    raise
                errors = [RowError(error.code, error.message)]
        return await self._call(services.book.end, self.lease, "failed", errors)

    def _unknown_models(self, models: dict[str, int]) -> list[RowError]:
        gate, batch, errors = self._services.gate, self.batch, []
        for model, line in models.items():
            try:
                caller = gate.caller(batch.tenant_id, batch.facts.key_id)
                if caller is not None:
                    gate.pool(model, caller)
            except ModelNotFound as error:
                errors.append(RowError(error.code, error.message, line, "model"))
            except PermissionDenied:
                pass  # rows wait for it
        return errors

    # -- in progress

    async def _answer_rows(self) -> None:
        """Until all rows are done and written, or it is stopped and what was answered is written."""
        if self._services.wall() >= self.batch.due_at:
            self.stop("expired")
        if self._stopped is not None:
            return
        loop = asyncio.get_running_loop()
        self._work, writing = loop.create_task(self._work_through()), loop.create_task(self._write_often())
        try:
            await self._work
        except asyncio.CancelledError:
            if self._stopped is None:  # the process ends
                raise
        finally:  # never cancelled: it may be between an object and its note
            self._is_over = True
            self._is_due.set()
            await writing
        if self._stopped == "expired" and self.batch.num_done >= self.batch.num_rows:
            self._stopped = None

    async def _work_through(self) -> None:
        outstanding = asyncio.Semaphore(2 * self._services.settings.max_in_flight)
        try:
            async with asyncio.TaskGroup() as rows:
                async for row in self._rows_left():
                    await outstanding.acquire()
                    while len(self._done) >= _MAX_UNWRITTEN:
                        await clocks.sleep(self._services.clock, _WRITE_EVERY_S)
                    task = rows.create_task(self._run_row(row))
                    task.add_done_callback(lambda _: outstanding.release())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _rows_left(self) -> AsyncIterator[BatchRow]:
        services, batch = self._services, self.batch
        done = await self._call(services.book.done_lines, batch.id)
        file = await services.files.find(batch.tenant_id, batch.input_file_id)
        if file is None:
            raise StoreCorrupt("the input file is gone")
        async for row in input.rows(services.files, file, batch.facts.endpoint):
            if row.line not in done:
                yield row

    async def _run_row(self, row: BatchRow) -> None:
        pause_s, num_broken = _FIRST_PAUSE_S, 0
        for number in count(1):
            answer = await self._try_row(row, number)
            if answer is not None:
                num_broken += answer.status in _BROKEN
                if answer.status not in _BUSY and (answer.status not in _BROKEN or num_broken >= _MAX_BROKEN):
                    break
            self._services.retried()
            wait_s = max(answer.retry_after_s if answer is not None else 0.0, pause_s * random.uniform(0.75, 1.25))
            await clocks.sleep(self._services.clock, min(wait_s, _MAX_PAUSE_S))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        assert answer is not None
        is_good = answer.status == 200
        request_id = f"{self.batch.id}-{row.line}"
        result = self._writer.answered(row, self._row_id(row), request_id, answer.status, answer.body)
        file = OUTPUT if is_good or not self._writer.has_error_file else ERRORS
        self._done.append(DoneRow(row.line, "completed" if is_good else "failed", file, result, answer.usage))
        if len(self._done) >= _MANY:
            self._is_due.set()
        self._services.rows["completed" if is_good else "failed"] += 1

    async def _try_row(self, row: BatchRow, number: int) -> Answer | None:
        """None: its tenant may do nothing now."""
        services, batch = self._services, self.batch
        try:
            caller = services.gate.caller(batch.tenant_id, batch.facts.key_id)
        except PermissionDenied:
            return None
        if caller is None:
            self._fail("tenant_not_found", "the tenant is gone, or has no key any more")
            return None
        try:
            pool = services.gate.pool(row.model, caller)
        except ModelNotFound:
            pool = ""  # the gateway says so
        async with services.slots.slot(pool):
            one = RowTry(batch.facts.endpoint, row.body, (batch.tenant_id, batch.id))
            self._tries.add(one)
            try:
                services.gate.begin(one.exchange, f"{batch.id}-{row.line}-{number}", caller, one)
                answer = await one.answer(f"{batch.id}/{row.line}", services.clock)
            finally:
                self._tries.discard(one)
            if answer.status in _BUSY:
                services.slots.refused(pool)
            return answer

    # -- writing

    async def _write_often(self) -> None:
        """Until no more rows are answered, and all that were are written, or are another owner's."""
        while not self._is_over or (self._done and self._stopped != "lost"):
            timer = self._services.clock.call_later(_WRITE_EVERY_S, self._is_due.set)
            await self._is_due.wait()
            timer.cancel()
            self._is_due.clear()
            try:
                await self._write()
            except LeaseLost as error:
                log.warning("%s", error.message)
                self.stop("lost")
                return
            except PenstockError as error:
                count_error("batches", error)
                log.warning("results of batch %s wait for the store: %s", self.batch.id, error.message)
                await clocks.sleep(self._services.clock, _AGAIN_S)
                self._is_due.set()

    async def _write(self) -> None:
        """Writes answers into the store, with what they cost."""
        while self._done and self._stopped != "lost":
            rows = self._done[:_MANY]
            self.batch = await self._call(self._services.book.commit, self.lease, rows)
            del self._done[: len(rows)]
            await self._spill(CHUNK_BYTES)

    async def _spill(self, at_least: int) -> None:
        """Results into the files of the batch, as long as there are enough for a chunk."""
        services = self._services
        while (found := await self._call(services.book.next_spill, self.lease, at_least, CHUNK_BYTES)) is not None:
            names = [f"{found.file_id}/{found.number:06d}-{epoch}" for epoch in range(1, self.lease.epoch + 1)]
            if found.file_id not in self._tidied:  # owners that were killed may have put one, and not noted it
                self._tidied.add(found.file_id)
                for name in names[:-1]:
                    await self._call(services.files.drop, name)
            chunk = await self._call(services.files.put, names[-1], found.data)
            await self._call(services.book.spilled, self.lease, found, chunk)

    # -- the end

    async def _close_rows(self, outcome: Literal["cancelled", "expired"]) -> None:
        """Rows that were not run are told, too."""
        rows = list[DoneRow]()
        file = ERRORS if self._writer.has_error_file else OUTPUT
        async for row in self._rows_left():
            result = self._writer.not_run(row, self._row_id(row), outcome)
            rows.append(DoneRow(row.line, outcome, file, result))
            self._services.rows[outcome] += 1
            if len(rows) >= 500:
                self.batch = await self._call(self._services.book.commit, self.lease, rows)
                await self._spill(CHUNK_BYTES)
                rows = []
        if rows:
            self.batch = await self._call(self._services.book.commit, self.lease, rows)

    async def _finish(self) -> StoredBatch:
        if self.batch.facts.output_file_id:
            await self._spill(1)
        errors = [self._failure] if self._failure is not None else []
        status = "completed" if self._stopped is None else self._stopped
        return await self._call(self._services.book.end, self.lease, status, errors)

    async def _give_up(self, code: str, error: PenstockError) -> StoredBatch | None:
        """Nobody can run it to its end."""
        try:
            self._stopped, self._failure = "failed", RowError(code, error.message)
            return await self._finish()
        except PenstockError as problem:
            log.warning("batch %s cannot be ended: %s", self.batch.id, problem.message)
            return None

    def _fail(self, code: str, message: str) -> None:
        self._failure = RowError(code, message)
        self.stop("failed")

    def _row_id(self, row: BatchRow) -> str:
        return f"batch_req_{self.batch.id.partition('_')[2]}-{row.line}"

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._services.files.blocking(function, *args, **kwargs)
