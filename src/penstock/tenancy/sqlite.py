"""SQLite: one file, no server; for all the processes of one host.

The write-ahead log lets readers go on beside a writer; `synchronous=FULL` has a commit on disk when it returns. Another
process's commit is noticed by a poll of `PRAGMA data_version`, which reads a counter in shared memory.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.core.errors import InvalidValue, StoreUnavailable
from penstock.core.private_files import make_private
from penstock.tenancy.database import Execute, Row

POLL_S = 0.02  # revocations are seen this much later, at most
_BUSY_S = 10.0  # how long a writer waits for the others


class SqliteDatabase:
    """One connection, used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection = _connect(path)

    @contextmanager
    def reading(self) -> Iterator[Execute]:
        with self._transaction("BEGIN") as execute:
            yield execute

    @contextmanager
    def writing(self) -> Iterator[Execute]:
        # The write lock is taken at the start: a transaction that reads first could find itself overtaken.
        with self._transaction("BEGIN IMMEDIATE") as execute:
            yield execute

    migrating = writing

    def notify(self, execute: Execute) -> None:
        """A commit is enough."""

    def watch(self) -> SqliteWatch:
        return SqliteWatch(_connect(self._path), self._path)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Execute]:
        with self._lock, _mapped(self._path):
            self._connection.execute(begin)
            try:
                yield self._execute
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def _execute(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        return self._connection.execute(sql, tuple(parameters)).fetchall()


class SqliteWatch:
    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._connection = connection
        self._path = path
        self._clock = clock
        self._sleep = sleep
        self._version = self._data_version()

    def wait(self, timeout_s: float) -> bool:
        deadline_s = self._clock() + timeout_s
        while (version := self._data_version()) == self._version:
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return False
            self._sleep(min(POLL_S, left_s))
        self._version = version
        return True

    def close(self) -> None:
        self._connection.close()

    def _data_version(self) -> int:
        with _mapped(self._path):
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])


def _connect(path: Path) -> sqlite3.Connection:
    with _mapped(path):
        try:
            make_private(path.parent)
            _create(path)
        except OSError as error:
            raise StoreUnavailable(f"cannot open the store {path}: {error.strerror}") from None
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        _use_write_ahead_log(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection


def _create(path: Path) -> None:
    """Its owner's alone. A file that is there is not touched: to close it here would end the locks that this process
    has on it, for POSIX locks belong to processes, and another process would take the log for abandoned."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Tries for _BUSY_S: of several processes that open a new file, SQLite refuses all but one without a wait."""
    deadline_s = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


@contextmanager
def _mapped(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.DataError, sqlite3.IntegrityError, OverflowError) as error:  # the last: no integer of 64 bits
        raise InvalidValue(f"the store {path} cannot hold this: {error}") from error
    except sqlite3.Error as error:
        raise StoreUnavailable(f"the store {path} does not work: {error}") from error
