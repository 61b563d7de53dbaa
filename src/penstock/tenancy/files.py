"""Files that tenants keep: names, sizes and the objects that hold their bytes, which are elsewhere.

A file is a list of chunks, each an object of the store of files (a directory, or S3): it grows by one chunk at a
time, and is read in that order. A row is written before its first object and goes after its last, so that no object is
without a row that tells of it: what a gateway that was killed left behind is found by its row, and swept away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from penstock.core.errors import Conflict, StorageQuotaExceeded
from penstock.tenancy.database import Database, Execute, Row, placeholders

WRITING, GROWING, READY, DELETING = "writing", "growing", "ready", "deleting"
ABANDONED_S = 3600.0  # after which an upload that nobody goes on with is swept away

_COLUMNS = "tenant_id, id, purpose, filename, status, num_bytes, created_at, expires_at, chunks"
_ACTIVE_BATCHES = "('validating', 'in_progress', 'finalizing', 'cancelling')"


class Chunk(NamedTuple):
    name: str  # of the object
    num_bytes: int


class StoredFile(NamedTuple):
    tenant_id: str
    id: str
    purpose: str
    filename: str
    status: str
    num_bytes: int
    created_at: float
    expires_at: float
    chunks: list[Chunk]


class FileLimits(Struct, frozen=True):
    """Room of each tenant: of all its files together, results of batches included."""

    max_bytes: int
    max_files: int


class FileBook:
    """Blocks. Whose a file is, is a matter of its tenant alone: for others it does not exist."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def begin(self, tenant_id: str, file_id: str, limits: FileLimits) -> None:
        """A file that is being uploaded. Raises StorageQuotaExceeded where there is no room for another."""
        now_s = self._clock()
        with self._database.writing() as execute:
            num_files, num_bytes = _held(execute, tenant_id)
            if num_files >= limits.max_files:
                raise StorageQuotaExceeded(f"this tenant keeps {num_files} files already: delete some")
            if num_bytes >= limits.max_bytes:
                raise StorageQuotaExceeded(_no_room(num_bytes, limits))
            insert_file(execute, tenant_id, file_id, "", "", WRITING, now_s, now_s + ABANDONED_S)

    def add_chunk(self, tenant_id: str, file_id: str, chunk: Chunk, limits: FileLimits) -> None:
        """One that an upload has written. Raises StorageQuotaExceeded, or Conflict where the file is gone."""
        with self._database.writing() as execute:
            _, num_bytes = _held(execute, tenant_id)
            if num_bytes + chunk.num_bytes > limits.max_bytes:
                raise StorageQuotaExceeded(_no_room(num_bytes, limits))
            if not append_chunk(execute, tenant_id, file_id, chunk, WRITING, self._clock()):
                raise Conflict("the upload took too long, and was given up")

    def finish(self, tenant_id: str, file_id: str, *, purpose: str, filename: str, ttl_s: float) -> StoredFile:
        now_s = self._clock()
        with self._database.writing() as execute:
            rows = execute(
                "UPDATE files SET purpose = ?, filename = ?, status = ?, touched_at = ?, expires_at = ? "
                f"WHERE tenant_id = ? AND id = ? AND status = ? RETURNING {_COLUMNS}",
                (purpose, filename, READY, now_s, now_s + ttl_s, tenant_id, file_id, WRITING),
            )
        if not rows:
            raise Conflict("the upload took too long, and was given up")
        return _stored(rows[0])

    def abandon(self, tenant_id: str, file_id: str) -> StoredFile | None:
        """An upload that nobody goes on with: its objects are to be deleted. None: there is none."""
        with self._database.writing() as execute:
            rows = execute(
                f"UPDATE files SET status = ? WHERE tenant_id = ? AND id = ? AND status = ? RETURNING {_COLUMNS}",
                (DELETING, tenant_id, file_id, WRITING),
            )
        return _stored(rows[0]) if rows else None

    def find(self, tenant_id: str, file_id: str) -> StoredFile | None:
        """One that is complete, and has not expired."""
        with self._database.reading() as execute:
            rows = execute(
                f"SELECT {_COLUMNS} FROM files WHERE tenant_id = ? AND id = ? AND status = ? AND expires_at > ?",
                (tenant_id, file_id, READY, self._clock()),
            )
        return _stored(rows[0]) if rows else None

    def page(
        self, tenant_id: str, purposes: Sequence[str], *, after: str | None, limit: int, is_descending: bool
    ) -> list[StoredFile] | None:
        """Returns up to `limit` of these purposes, by age, past the one named `after`; None: there is no such file."""
        way, sort = ("<", "DESC") if is_descending else (">", "ASC")
        where = f"tenant_id = ? AND status = ? AND expires_at > ? AND purpose IN {placeholders(1, len(purposes))}"
        values: list[object] = [tenant_id, READY, self._clock(), *purposes]
        with self._database.reading() as execute:
            if after is not None:
                found = execute("SELECT created_at FROM files WHERE tenant_id = ? AND id = ?", (tenant_id, after))
                if not found:
                    return None
                where = f"{where} AND (created_at {way} ? OR (created_at = ? AND id {way} ?))"
                values += [found[0][0], found[0][0], after]
            rows = execute(
                f"SELECT {_COLUMNS} FROM files WHERE {where} ORDER BY created_at {sort}, id {sort} LIMIT ?",
                [*values, limit],
            )
        return [_stored(row) for row in rows]

    def begin_delete(self, tenant_id: str, file_id: str) -> StoredFile | None:
        """Hides a file from all but `gone`, and returns it if there is one. Raises Conflict while a batch reads it."""
        with self._database.writing() as execute:
            readers = execute(
                f"SELECT id FROM batches WHERE tenant_id = ? AND input_file_id = ? AND status IN {_ACTIVE_BATCHES}",
                (tenant_id, file_id),
            )
            if readers:
                raise Conflict(f"the batch {readers[0][0]} reads this file: cancel it, or wait for its end")
            rows = execute(
                f"UPDATE files SET status = ? WHERE tenant_id = ? AND id = ? AND status = ? RETURNING {_COLUMNS}",
                (DELETING, tenant_id, file_id, READY),
            )
        return _stored(rows[0]) if rows else None

    def gone(self, file: StoredFile) -> None:
        """Its objects are deleted."""
        with self._database.writing() as execute:
            execute(
                "DELETE FROM files WHERE tenant_id = ? AND id = ? AND status = ?", (file.tenant_id, file.id, DELETING)
            )

    def sweep(self, limit: int = 100) -> list[StoredFile]:
        """Marks files as going whose time is over, or whose upload nobody goes on with; and returns them, with those
        that somebody else has not deleted to the end. One that a batch reads stays until that has ended."""
        now_s = self._clock()
        with self._database.writing() as execute:
            execute(
                "UPDATE files SET status = ? WHERE (status = ? AND touched_at <= ?) OR (status = ? AND expires_at <= ? "
                "AND NOT EXISTS (SELECT 1 FROM batches WHERE batches.tenant_id = files.tenant_id AND "
                f"batches.input_file_id = files.id AND batches.status IN {_ACTIVE_BATCHES}))",
                (DELETING, WRITING, now_s - ABANDONED_S, READY, now_s),
            )
            rows = execute(
                f"SELECT {_COLUMNS} FROM files WHERE status = ? ORDER BY expires_at LIMIT ?", (DELETING, limit)
            )
        return [_stored(row) for row in rows]

    def forget(self, execute: Execute, tenant_id: str) -> None:
        """All that a tenant has, inside somebody's transaction; objects are deleted by the next sweep."""
        execute("UPDATE files SET status = ? WHERE tenant_id = ?", (DELETING, tenant_id))


def insert_file(
    execute: Execute,
    tenant_id: str,
    file_id: str,
    purpose: str,
    filename: str,
    status: str,
    now_s: float,
    expires_at: float,
) -> None:
    execute(
        "INSERT INTO files (tenant_id, id, purpose, filename, status, num_bytes, created_at, touched_at, expires_at, "
        "chunks) VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?, '[]')",
        (tenant_id, file_id, purpose, filename, status, now_s, now_s, expires_at),
    )


def append_chunk(execute: Execute, tenant_id: str, file_id: str, chunk: Chunk, status: str, now_s: float) -> bool:
    """False: there is no such file in this status."""
    where = "WHERE tenant_id = ? AND id = ? AND status = ?"
    found = execute(f"SELECT chunks FROM files {where}", (tenant_id, file_id, status))
    if not found:
        return False
    chunks = [*_chunks.decode(str(found[0][0])), chunk]
    execute(
        f"UPDATE files SET chunks = ?, num_bytes = num_bytes + ?, touched_at = ? {where}",
        (msgspec.json.encode(chunks).decode(), chunk.num_bytes, now_s, tenant_id, file_id, status),
    )
    return True


def num_chunks(execute: Execute, tenant_id: str, file_id: str) -> int:
    found = execute("SELECT chunks FROM files WHERE tenant_id = ? AND id = ?", (tenant_id, file_id))
    return len(_chunks.decode(str(found[0][0]))) if found else 0


def _held(execute: Execute, tenant_id: str) -> tuple[int, int]:
    (row,) = execute("SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM files WHERE tenant_id = ?", (tenant_id,))
    return int(row[0]), int(row[1])


def _no_room(num_bytes: int, limits: FileLimits) -> str:
    return f"this tenant's files take {num_bytes} of {limits.max_bytes} bytes, which leaves no room: delete some"


_chunks = msgspec.json.Decoder(list[Chunk])


def _stored(row: Row) -> StoredFile:
    tenant_id, file_id, purpose, filename, status, num_bytes, created_at, expires_at, chunks = row
    return StoredFile(
        str(tenant_id),
        str(file_id),
        str(purpose),
        str(filename),
        str(status),
        int(num_bytes),
        float(created_at),
        float(expires_at),
        _chunks.decode(str(chunks)),
    )
