"""Replicas that were added while gateways run: kept in the store, and followed by every gateway that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from penstock.core.errors import InvalidValue, ReplicaNotFound
from penstock.observe.background import count_error
from penstock.tenancy.database import Database, Execute
from penstock.tenancy.revisions import next_revision

OPTIONS = (
    "served_as",
    "dialect",
    "key_env",
    "secret_env",
    "ca_file",
    "server_name",
    "client_cert",
    "client_key",
    "zone",
)
RESTING = ("starting", "parked", "waking", "standby", "parking", "stopping")  # states without traffic, on purpose
_MAX_NAME = 256


class ReplicaRow(Struct, frozen=True, omit_defaults=True):
    """A replica of one pool."""

    model: str  # the pool: a model, or model@version
    url: str
    is_draining: bool = False  # it is sent nothing new
    options: dict[str, Any] = field(default_factory=dict)  # settings of `models` for this replica
    by: str = ""  # an admin's name
    at: float = 0.0  # seconds since 1970
    state: str = ""  # of `RESTING`, beside `is_draining`, if a controller keeps it so; empty: it is used, or drains


_replica_row_decoder = msgspec.json.Decoder(ReplicaRow)


class ReplicaBook:
    """The store's part of it. Blocks: for commands and for threads of their own."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def add(
        self,
        model: str,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        is_draining: bool = False,
        by: str = "",
        state: str = "",
    ) -> ReplicaRow:
        """The same again changes its options, whether it drains, and its state."""
        if state and (state not in RESTING or not is_draining):
            raise InvalidValue(f"a replica without traffic is one of: {', '.join(RESTING)}", param="state")
        if not model or len(model) > _MAX_NAME or not model.isprintable():
            raise InvalidValue(f"a model's name has 1 to {_MAX_NAME} printable characters", param="model")
        row = ReplicaRow(model, normal_url(url), is_draining, dict(options or {}), by, self._clock(), state)
        with self._writing() as execute:
            _write(execute, row)
        return row

    def drain(self, url: str, model: str | None = None, *, is_draining: bool = True, by: str = "") -> list[ReplicaRow]:
        """Marks a replica as draining in every pool that it is in, or in this one. False: it is used again. A state
        that a controller keeps it in is cleared."""
        with self._writing() as execute:
            found, now = _find(execute, url, model), self._clock()
            rows = [replace(row, is_draining=is_draining, by=by, at=now, state="") for row in found]
            for row in rows:
                _write(execute, row)
        return rows

    def remove(self, url: str, model: str | None = None) -> list[ReplicaRow]:
        with self._writing() as execute:
            rows = _find(execute, url, model)
            for row in rows:
                execute("DELETE FROM replicas WHERE model = ? AND url = ?", (row.model, row.url))
        return rows

    def all(self) -> list[ReplicaRow]:
        with self._database.reading() as execute:
            return _all(execute)

    @contextmanager
    def _writing(self) -> Iterator[Execute]:
        with self._database.writing() as execute:
            revision = next_revision(self._database, execute)
            execute("UPDATE replica_changes SET revision = ?", (revision,))
            yield execute


def write_members(database: Database, execute: Execute, rows: Iterable[ReplicaRow], gone: Iterable[ReplicaRow]) -> None:
    """Adds or changes rows and removes others, in a transaction of somebody else's: all at one revision."""
    execute("UPDATE replica_changes SET revision = ?", (next_revision(database, execute),))
    for row in rows:
        _write(execute, row)
    for row in gone:
        execute("DELETE FROM replicas WHERE model = ? AND url = ?", (row.model, row.url))


def _write(execute: Execute, row: ReplicaRow) -> None:
    execute(
        "INSERT INTO replicas (model, url, document) VALUES (?, ?, ?) "
        "ON CONFLICT (model, url) DO UPDATE SET document = excluded.document",
        (row.model, row.url, msgspec.json.encode(row).decode()),
    )


def normal_url(url: str) -> str:
    """The address of a replica as it is kept: without a slash at its end."""
    parts = urlsplit(url)
    try:
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port that is no number
        is_right = False
    is_more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if not is_right or is_more or not url.isprintable():
        raise InvalidValue("a replica's address is http://HOST:PORT or https://HOST", param="url")
    return url.rstrip("/")


def replicas_changed(execute: Execute, since: int) -> tuple[ReplicaRow, ...] | None:
    """All of them, if one was added, changed or removed after revision `since`. None: none was."""
    if not execute("SELECT 1 FROM replica_changes WHERE revision > ?", (since,)):
        return None
    return tuple(_all(execute))


def _all(execute: Execute) -> list[ReplicaRow]:
    found = []
    for (document,) in execute("SELECT document FROM replicas ORDER BY model, url"):
        try:
            found.append(_replica_row_decoder.decode(document))
        except (ValueError, TypeError) as error:
            count_error("store reader", error)
    return found


def _find(execute: Execute, url: str, model: str | None) -> list[ReplicaRow]:
    url = normal_url(url)
    found = [row for row in _all(execute) if row.url == url and model in (None, row.model)]
    if not found:
        of = f" of '{model}'" if model else ""
        raise ReplicaNotFound(f"the store has no replica {url}{of}: one that is in a gateway's file is changed there")
    return found
