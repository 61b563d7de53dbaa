"""The database protocol of the store: transactions, and a wake-up when another process changed something.

SQL is written once, in what SQLite and PostgreSQL have in common, with `?` for parameters. The two differ only behind
this protocol. Databases block: the gateway uses them from threads of their own, never on its event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

Row = tuple[Any, ...]
MAX_ROWS = 500  # of one statement: both databases bound the number of parameters


class Execute(Protocol):
    def __call__(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]: ...


class Watch(Protocol):
    """A connection of its own that notices commits. Made before the first read, so that nothing falls in between."""

    def wait(self, timeout_s: float) -> bool:
        """Whether something may have been committed; False when the time passed without."""

    def close(self) -> None: ...


class Database(Protocol):
    """Every method raises StoreUnavailable when the database does not answer; the next call tries anew. InvalidValue:
    it answers, and cannot hold what it was given."""

    def reading(self) -> AbstractContextManager[Execute]:
        """One snapshot: what is read inside belongs together."""

    def writing(self) -> AbstractContextManager[Execute]:
        """All or nothing, on disk when it returns."""

    def migrating(self) -> AbstractContextManager[Execute]:
        """A transaction like `writing`, for one process at a time."""

    def notify(self, execute: Execute) -> None:
        """Wake every watch when the transaction of `execute` is committed."""

    def watch(self) -> Watch: ...

    def close(self) -> None: ...


def placeholders(num_rows: int, num_columns: int) -> str:
    """`(?, ?), (?, ?)`: the VALUES of so many rows."""
    return ", ".join(["(" + ", ".join("?" * num_columns) + ")"] * num_rows)
