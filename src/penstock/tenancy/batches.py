"""Batches of requests: who runs them, how far they have come, and what each row of them cost.

A batch is run by one process at a time, its owner, for as long as that renews its lease; then another takes it over.
Each claim has a number, the epoch, and whatever an owner writes is refused once a later epoch exists.

A row that is answered is written with its charge in one transaction, so no order of crashes bills it twice, or has its
result and not its bill: either both are here or neither is, and then the row is run again. Results wait here until
there are enough of them for an object of the store of files. What a row asks and what is answered, others know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from penstock.core.errors import Conflict, FileNotFound, LeaseLost, StorageQuotaExceeded
from penstock.tenancy.database import MAX_ROWS, Database, Execute, Row, placeholders
from penstock.tenancy.files import GROWING, READY, Chunk, append_chunk, insert_file, num_chunks
from penstock.tenancy.usage import Usage, count_usages

ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
_IS_ACTIVE = f"status IN {ACTIVE}"
_COLUMNS = (
    "tenant_id, id, kind, status, created_at, due_at, input_file_id, num_rows, completed, failed, cancelled, expired, "
    "epoch, document"
)
_EVER = 1e15  # an end that has not been set yet

OUTPUT, ERRORS = "output", "errors"  # the files of a batch
OUTCOMES = ("completed", "failed", "cancelled", "expired")


class RowError(Struct, frozen=True, omit_defaults=True):
    """An error in the input of a batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFacts(Struct, frozen=True, omit_defaults=True):
    """Members of a batch that nobody looks it up by."""

    endpoint: str
    completion_window: str
    key_id: str
    keep_s: float  # results, after its end
    metadata: dict[str, str] | None = None
    output_file_id: str = ""
    error_file_id: str = ""  # empty: all results are in one file
    errors: tuple[RowError, ...] = ()
    times: dict[str, float] = field(default_factory=dict)  # by status, when it was taken


class StoredBatch(NamedTuple):
    tenant_id: str
    id: str
    kind: str  # which API it belongs to
    status: str
    created_at: float
    due_at: float
    input_file_id: str
    num_rows: int
    completed: int
    failed: int
    cancelled: int
    expired: int
    epoch: int
    facts: BatchFacts

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE

    @property
    def num_done(self) -> int:
        return self.completed + self.failed + self.cancelled + self.expired


class BatchLimits(Struct, frozen=True):
    max_rows: int  # of each tenant, in all batches that have not ended; one that is not counted yet is one row


class Lease(NamedTuple):
    """An owner's right to write to a batch."""

    tenant_id: str
    batch_id: str
    owner: str
    epoch: int


class DoneRow(NamedTuple):
    """A row that is over, with what its file says of it."""

    line: int
    outcome: str
    file: str  # OUTPUT or ERRORS
    result: bytes
    usage: Usage | None = None  # under an id of its own, that all who run this row would give it


class Spill(NamedTuple):
    """Results that are to become a chunk of a file."""

    file_id: str
    number: int  # of the chunk
    lines: list[int]
    data: bytes


class BatchBook:
    """Blocks: for threads of their own."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    # -- for clients

    def add(
        self,
        tenant_id: str,
        batch_id: str,
        kind: str,
        facts: BatchFacts,
        *,
        input_file_id: str,
        window_s: float,
        limits: BatchLimits,
        num_rows: int = 0,
    ) -> StoredBatch:
        """`num_rows`: 0: they are to be counted yet. Raises StorageQuotaExceeded where the tenant would have more rows
        under way than it may, and FileNotFound."""
        now_s = self._clock()
        with self._database.writing() as execute:
            if not execute(
                "SELECT 1 FROM files WHERE tenant_id = ? AND id = ? AND status = ?", (tenant_id, input_file_id, READY)
            ):
                raise FileNotFound(f"there is no file '{input_file_id}'", param="input_file_id")
            _check_room(execute, tenant_id, batch_id, max(1, num_rows), limits)
            rows = execute(
                f"INSERT INTO batches ({_COLUMNS}, kept_until) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, ?, ?) "
                f"RETURNING {_COLUMNS}",
                (
                    tenant_id,
                    batch_id,
                    kind,
                    "validating",
                    now_s,
                    now_s + window_s,
                    input_file_id,
                    num_rows,
                    msgspec.json.encode(facts).decode(),
                    _EVER,
                ),
            )
        return _stored(rows[0])

    def find(self, tenant_id: str, batch_id: str, kind: str) -> StoredBatch | None:
        with self._database.reading() as execute:
            rows = execute(
                f"SELECT {_COLUMNS} FROM batches WHERE tenant_id = ? AND id = ? AND kind = ? AND kept_until > ?",
                (tenant_id, batch_id, kind, self._clock()),
            )
        return _stored(rows[0]) if rows else None

    def page(
        self, tenant_id: str, kind: str, *, after: str | None, limit: int, is_descending: bool = True
    ) -> list[StoredBatch] | None:
        """Returns up to `limit`, newest first (or oldest), past the one named `after`; None: there is no such batch."""
        way, sort = ("<", "DESC") if is_descending else (">", "ASC")
        where = "tenant_id = ? AND kind = ? AND kept_until > ?"
        values: list[object] = [tenant_id, kind, self._clock()]
        with self._database.reading() as execute:
            if after is not None:
                found = execute(
                    "SELECT created_at FROM batches WHERE tenant_id = ? AND id = ? AND kind = ?",
                    (tenant_id, after, kind),
                )
                if not found:
                    return None
                where = f"{where} AND (created_at {way} ? OR (created_at = ? AND id {way} ?))"
                values += [found[0][0], found[0][0], after]
            rows = execute(
                f"SELECT {_COLUMNS} FROM batches WHERE {where} ORDER BY created_at {sort}, id {sort} LIMIT ?",
                [*values, limit],
            )
        return [_stored(row) for row in rows]

    def cancel(self, tenant_id: str, batch_id: str, kind: str) -> StoredBatch | None:
        """None: there is none. One that is being cancelled stays so. Raises Conflict where it is too late."""
        with self._database.writing() as execute:
            batch = _locked(execute, tenant_id, batch_id, kind)
            if batch is None or batch.status == "cancelling":
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise Conflict(f"the batch is {batch.status}: only one that is not finished can be cancelled")
            return _change(execute, batch, "cancelling", batch.facts, self._clock())

    def delete(self, tenant_id: str, batch_id: str, kind: str) -> bool:
        """One that has ended, and its files. False: there is none. Raises Conflict for one that has not ended."""
        with self._database.writing() as execute:
            batch = _locked(execute, tenant_id, batch_id, kind)
            if batch is None:
                return False
            if batch.is_active:
                raise Conflict("the batch has not ended: cancel it first, or wait for its end")
            _delete(execute, batch, with_input=True)
        return True

    # -- for owners

    def claim(self, owner: str, lease_s: float, *, busy: Iterable[str] = ()) -> StoredBatch | None:
        """The oldest batch that nobody runs, now this owner's; None: there is none. `busy`: tenants who are to have no
        more of them here."""
        now_s, others = self._clock(), sorted(set(busy))
        free = f"{_IS_ACTIVE} AND (owner IS NULL OR owner_until <= ?)"
        tenants = f" AND tenant_id NOT IN {placeholders(1, len(others))}" if others else ""
        with self._database.reading() as execute:  # most looks find nothing, and need no lock
            found = execute(
                f"SELECT tenant_id, id FROM batches WHERE {free}{tenants} ORDER BY created_at, id LIMIT 1",
                (now_s, *others),
            )
        if not found:
            return None
        with self._database.writing() as execute:
            rows = execute(
                "UPDATE batches SET owner = ?, owner_until = ?, epoch = epoch + 1 "
                f"WHERE tenant_id = ? AND id = ? AND {free} RETURNING {_COLUMNS}",
                (owner, now_s + lease_s, *found[0], now_s),
            )
        return _stored(rows[0]) if rows else None

    def renew(self, owner: str, batch_ids: Sequence[str], lease_s: float) -> dict[str, str]:
        """Renews the lease of those among them that are still this owner's; their status by id."""
        with self._database.writing() as execute:
            rows = execute(
                f"UPDATE batches SET owner_until = ? WHERE owner = ? AND {_IS_ACTIVE} AND id IN "
                f"{placeholders(1, len(batch_ids))} RETURNING id, status",
                (self._clock() + lease_s, owner, *batch_ids),
            )
        return {str(batch_id): str(status) for batch_id, status in rows}

    def give_back(self, lease: Lease, pause_s: float) -> None:
        """It could not be gone on with: another owner may try it, after a pause."""
        with self._database.writing() as execute:
            execute(
                "UPDATE batches SET owner = '', owner_until = ? WHERE tenant_id = ? AND id = ? AND owner = ? AND "
                "epoch = ?",
                (self._clock() + pause_s, *lease),
            )

    def release(self, owner: str) -> None:
        """Another process may go on with them at once."""
        with self._database.writing() as execute:
            execute("UPDATE batches SET owner = NULL, owner_until = NULL WHERE owner = ?", (owner,))

    def done_lines(self, batch_id: str) -> set[int]:
        with self._database.reading() as execute:
            return {int(line) for (line,) in execute("SELECT line FROM batch_rows WHERE batch_id = ?", (batch_id,))}

    def begin(self, lease: Lease, *, num_rows: int, limits: BatchLimits, has_error_file: bool) -> StoredBatch:
        """Its input is as it should be: from now on it has files that grow, and is in progress unless it is being
        cancelled. Raises StorageQuotaExceeded."""
        now_s = self._clock()
        with self._database.writing() as execute:
            batch = _held(execute, lease)
            if batch.facts.output_file_id:
                return batch
            _check_room(execute, batch.tenant_id, batch.id, num_rows, limits)
            stem = batch.id.partition("_")[2]
            files = {OUTPUT: f"file-out-{stem}"} | ({ERRORS: f"file-err-{stem}"} if has_error_file else {})
            for name, file_id in files.items():
                filename = f"{batch.id}_{'output' if name == OUTPUT else 'error'}.jsonl"
                insert_file(execute, batch.tenant_id, file_id, "batch_output", filename, GROWING, now_s, _EVER)
            facts = msgspec.structs.replace(
                batch.facts, output_file_id=files[OUTPUT], error_file_id=files.get(ERRORS, "")
            )
            execute("UPDATE batches SET num_rows = ? WHERE tenant_id = ? AND id = ?", (num_rows, *lease[:2]))
            if batch.status == "cancelling":
                return _change(execute, batch, batch.status, facts, facts.times[batch.status])
            return _change(execute, batch, "in_progress", facts, now_s)

    def commit(self, lease: Lease, rows: Sequence[DoneRow]) -> StoredBatch:
        """Rows that are over, and what they cost. One that is here already is not written, and not charged, again."""
        now_s = self._clock()
        with self._database.writing() as execute:
            batch = _held(execute, lease)
            new: set[int] = set()
            for start in range(0, len(rows), MAX_ROWS):
                part = rows[start : start + MAX_ROWS]
                values = [
                    value
                    for row in part
                    for value in (batch.id, row.line, row.file, len(row.result), row.result.decode())
                ]
                added = execute(
                    "INSERT INTO batch_rows (batch_id, line, file, num_bytes, result) "
                    f"VALUES {placeholders(len(part), 5)} ON CONFLICT DO NOTHING RETURNING line",
                    values,
                )
                new |= {int(line) for (line,) in added}
            fresh = [row for row in rows if row.line in new]
            count_usages(execute, [row.usage for row in fresh if row.usage is not None], now_s=now_s)
            counts = [sum(row.outcome == outcome for row in fresh) for outcome in OUTCOMES]
            found = execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?, cancelled = cancelled + ?, "
                f"expired = expired + ? WHERE tenant_id = ? AND id = ? RETURNING {_COLUMNS}",
                (*counts, *lease[:2]),
            )
        return _stored(found[0])

    def next_spill(self, lease: Lease, at_least: int, at_most: int) -> Spill | None:
        """Results of one file that are in none of its chunks, if there are `at_least` so many bytes of them."""
        with self._database.reading() as execute:
            batch = _held(execute, lease, for_update=False)
            waiting = execute(
                "SELECT file, SUM(num_bytes) FROM batch_rows WHERE batch_id = ? AND result IS NOT NULL "
                "GROUP BY file ORDER BY file",
                (batch.id,),
            )
            name = next((str(name) for name, num_bytes in waiting if int(num_bytes) >= at_least), None)
            if name is None:
                return None
            sizes = execute(
                "SELECT line, num_bytes FROM batch_rows WHERE batch_id = ? AND file = ? AND result IS NOT NULL "
                "ORDER BY line",
                (batch.id, name),
            )
            lines, total = list[int](), 0
            for line, num_bytes in sizes:
                if lines and (total + int(num_bytes) > at_most or len(lines) >= MAX_ROWS - 2):
                    break
                lines.append(int(line))
                total += int(num_bytes)
            results = execute(
                f"SELECT result FROM batch_rows WHERE batch_id = ? AND line IN {placeholders(1, len(lines))} "
                "ORDER BY line",
                (batch.id, *lines),
            )
            file_id = batch.facts.output_file_id if name == OUTPUT else batch.facts.error_file_id
            number = num_chunks(execute, batch.tenant_id, file_id)
        return Spill(file_id, number, lines, b"".join(str(result).encode() for (result,) in results))

    def spilled(self, lease: Lease, spill: Spill, chunk: Chunk) -> None:
        """The results are in an object, which is the next chunk of their file."""
        with self._database.writing() as execute:
            batch = _held(execute, lease)
            append_chunk(execute, lease.tenant_id, spill.file_id, chunk, GROWING, self._clock())
            execute(
                f"UPDATE batch_rows SET result = NULL WHERE batch_id = ? AND line IN "
                f"{placeholders(1, len(spill.lines))}",
                (batch.id, *spill.lines),
            )

    def finalize(self, lease: Lease) -> StoredBatch:
        """No row of it is run any more; what is left is to be put into files."""
        with self._database.writing() as execute:
            batch = _held(execute, lease)
            return _change(execute, batch, "finalizing", batch.facts, self._clock())

    def end(self, lease: Lease, status: str, errors: Sequence[RowError] = ()) -> StoredBatch:
        """All of its results are in its files, which can be read from now on. A file without results goes. `errors`:
        why it could not be run, or not to its end."""
        now_s = self._clock()
        with self._database.writing() as execute:
            batch = _held(execute, lease)
            left = {"output_file_id": batch.facts.output_file_id, "error_file_id": batch.facts.error_file_id}
            for name, file_id in left.items():
                empty = execute(
                    "DELETE FROM files WHERE tenant_id = ? AND id = ? AND status = ? AND num_bytes = 0 RETURNING id",
                    (batch.tenant_id, file_id, GROWING),
                )
                left[name] = "" if empty else file_id
                execute(
                    "UPDATE files SET status = ?, created_at = ?, expires_at = ? "
                    "WHERE tenant_id = ? AND id = ? AND status = ?",
                    (READY, now_s, now_s + batch.facts.keep_s, batch.tenant_id, file_id, GROWING),
                )
            facts = msgspec.structs.replace(batch.facts, **left, errors=tuple(errors))
            return _end(execute, batch, status, facts, now_s)

    # -- for everybody, now and then

    def sweep(self) -> int:
        """Forgets batches whose results are no longer kept; how many those were."""
        with self._database.writing() as execute:
            rows = execute(f"SELECT {_COLUMNS} FROM batches WHERE kept_until <= ?", (self._clock(),))
            for row in rows:
                _delete(execute, _stored(row), with_input=False)
        return len(rows)

    def forget(self, execute: Execute, tenant_id: str) -> None:
        """All that a tenant has, inside somebody's transaction."""
        execute("DELETE FROM batch_rows WHERE batch_id IN (SELECT id FROM batches WHERE tenant_id = ?)", (tenant_id,))
        execute("DELETE FROM batches WHERE tenant_id = ?", (tenant_id,))


def _locked(execute: Execute, tenant_id: str, batch_id: str, kind: str) -> StoredBatch | None:
    """The batch, which nobody else can change until the end of the transaction."""
    rows = execute(
        f"UPDATE batches SET epoch = epoch WHERE tenant_id = ? AND id = ? AND kind = ? RETURNING {_COLUMNS}",
        (tenant_id, batch_id, kind),
    )
    return _stored(rows[0]) if rows else None


def _held(execute: Execute, lease: Lease, *, for_update: bool = True) -> StoredBatch:
    """The batch of a lease. Raises LeaseLost where another owner has it, or nobody, or it was deleted."""
    where = "WHERE tenant_id = ? AND id = ? AND owner = ? AND epoch = ?"
    sql = f"UPDATE batches SET epoch = epoch {where} RETURNING {_COLUMNS}"
    rows = execute(sql if for_update else f"SELECT {_COLUMNS} FROM batches {where}", lease)
    if not rows:
        raise LeaseLost(f"the batch {lease.batch_id} is another gateway's now, or nobody's")
    return _stored(rows[0])


def _change(execute: Execute, batch: StoredBatch, status: str, facts: BatchFacts, now_s: float) -> StoredBatch:
    facts = msgspec.structs.replace(facts, times=facts.times | {status: now_s})
    rows = execute(
        f"UPDATE batches SET status = ?, document = ? WHERE tenant_id = ? AND id = ? RETURNING {_COLUMNS}",
        (status, msgspec.json.encode(facts).decode(), batch.tenant_id, batch.id),
    )
    return _stored(rows[0])


def _end(execute: Execute, batch: StoredBatch, status: str, facts: BatchFacts, now_s: float) -> StoredBatch:
    execute("DELETE FROM batch_rows WHERE batch_id = ?", (batch.id,))
    execute(
        "UPDATE batches SET owner = NULL, owner_until = NULL, kept_until = ? WHERE tenant_id = ? AND id = ?",
        (now_s + facts.keep_s, batch.tenant_id, batch.id),
    )
    return _change(execute, batch, status, facts, now_s)


def _delete(execute: Execute, batch: StoredBatch, *, with_input: bool) -> None:
    """Its files expire with it; objects are deleted by the next sweep of files."""
    files = [batch.facts.output_file_id, batch.facts.error_file_id, batch.input_file_id if with_input else ""]
    for file_id in filter(None, files):
        execute(
            "UPDATE files SET expires_at = 0 WHERE tenant_id = ? AND id = ? AND status = ?",
            (batch.tenant_id, file_id, READY),
        )
    execute("DELETE FROM batches WHERE tenant_id = ? AND id = ?", (batch.tenant_id, batch.id))


def _check_room(execute: Execute, tenant_id: str, batch_id: str, num_rows: int, limits: BatchLimits) -> None:
    """Raises StorageQuotaExceeded where a batch of so many rows is too much beside the others of its tenant."""
    (row,) = execute(
        "SELECT COALESCE(SUM(CASE WHEN num_rows = 0 THEN 1 ELSE num_rows END), 0) FROM batches "
        f"WHERE tenant_id = ? AND id <> ? AND {_IS_ACTIVE}",
        (tenant_id, batch_id),
    )
    others = int(row[0])
    if others + num_rows > limits.max_rows:
        raise StorageQuotaExceeded(
            f"{num_rows} rows, beside {others} of other batches that have not ended, are more than the "
            f"{limits.max_rows} that this tenant may have"
        )


_facts = msgspec.json.Decoder(BatchFacts)


def _stored(row: Row) -> StoredBatch:
    tenant_id, batch_id, kind, status, created_at, due_at, input_file_id, *counts, epoch, document = row
    num_rows, completed, failed, cancelled, expired = (int(count) for count in counts)
    return StoredBatch(
        str(tenant_id),
        str(batch_id),
        str(kind),
        str(status),
        float(created_at),
        float(due_at),
        str(input_file_id),
        num_rows,
        completed,
        failed,
        cancelled,
        expired,
        int(epoch),
        _facts.decode(str(document)),
    )
