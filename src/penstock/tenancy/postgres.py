"""PostgreSQL: for gateways on several hosts. Other processes' commits arrive by LISTEN/NOTIFY.

The driver is psycopg 3: it is the maintained successor of the most used one, typed, and it can be called without an
event loop, so that the commands, the gateway's threads and SQLite share one path. asyncpg is faster but can only be
awaited, and nothing here is on a request's path.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from penstock.core.errors import InvalidValue, StoreUnavailable
from penstock.tenancy.database import Execute, Row

_CHANNEL = "penstock_changes"
_MIGRATION_LOCK = 0x70656E73  # any number that no other program's migrations lock
_CONNECTING: dict[str, Any] = {
    "connect_timeout": 5,
    "application_name": "penstock",
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}  # a host that vanished is noticed in about ten seconds


class PostgresDatabase:
    """One connection, used by one thread at a time, and made anew when it broke."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        with _mapped():
            self._connection = _connect(url)

    @contextmanager
    def reading(self) -> Iterator[Execute]:
        with self._transaction("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY") as execute:
            yield execute

    @contextmanager
    def writing(self) -> Iterator[Execute]:
        with self._transaction() as execute:
            yield execute

    @contextmanager
    def migrating(self) -> Iterator[Execute]:
        with self._transaction(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})") as execute:
            yield execute

    def notify(self, execute: Execute) -> None:
        execute(f"NOTIFY {_CHANNEL}")

    def watch(self) -> PostgresWatch:
        with _mapped():
            return PostgresWatch(_connect(self._url))

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self, first: str | None = None) -> Iterator[Execute]:
        with self._lock, _mapped():
            connection = self._connected()
            with connection.transaction():
                if first is not None:
                    _execute(connection, first)
                yield lambda sql, parameters=(): _execute(connection, sql, parameters)

    def _connected(self) -> psycopg.Connection[Row]:
        """One round trip more, so that a restarted server is met here and not in mid-transaction."""
        try:
            self._connection.execute("SELECT 1")
        except psycopg.OperationalError:
            self._connection.close()
            self._connection = _connect(self._url)
        return self._connection


class PostgresWatch:
    def __init__(self, connection: psycopg.Connection[Row]) -> None:
        self._connection = connection
        _execute(connection, f"LISTEN {_CHANNEL}")

    def wait(self, timeout_s: float) -> bool:
        with _mapped():
            return any(True for _ in self._connection.notifies(timeout=timeout_s, stop_after=1))

    def close(self) -> None:
        self._connection.close()


def _connect(url: str) -> psycopg.Connection[Row]:
    return psycopg.connect(url, autocommit=True, **_CONNECTING)


def _execute(connection: psycopg.Connection[Row], sql: str, parameters: Sequence[object] = ()) -> list[Row]:
    # Our own statements, though not literals; what comes from outside is a parameter.
    cursor = connection.execute(sql.replace("?", "%s"), parameters or None)
    return cursor.fetchall() if cursor.description else []


@contextmanager
def _mapped() -> Iterator[None]:
    """Foreign errors in our words. A driver's message may quote the connection string, so only its kind is told."""
    try:
        yield
    except (psycopg.DataError, psycopg.IntegrityError) as error:
        reason = error.diag.message_primary or type(error).__name__
        raise InvalidValue(f"the PostgreSQL store cannot hold this: {reason}") from error
    except psycopg.Error as error:
        reason = error.diag.message_primary or type(error).__name__
        raise StoreUnavailable(f"the PostgreSQL store does not work: {reason}") from error
