"""The store of tenants, keys, usage, shares of versions and replicas, for every gateway and command: `open_store(url)`.

    sqlite:///relative/path, sqlite:////absolute/path     the processes of one host
    postgresql://user@host/name                           any number of hosts

Every change to a tenant, its keys, a route or a replica takes the next revision, in the order of their commits, and
wakes the watches. A follower asks for the changes since the revision it has seen and gets each changed tenant whole, as
it is now: what it applies twice or late is still right. The store blocks; it is for commands and for threads of their
own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from penstock.core.converter import Converter
from penstock.core.errors import (
    ConfigError,
    Conflict,
    InvalidValue,
    KeyNotFound,
    PenstockError,
    StoreCorrupt,
    TenantNotFound,
)
from penstock.core.rollout import RolloutOrder
from penstock.observe.background import count_error
from penstock.observe.redaction import redact
from penstock.tenancy.admins import AdminBook, AdminKey, admins_changed
from penstock.tenancy.batches import BatchBook
from penstock.tenancy.database import Database, Execute, Row, Watch
from penstock.tenancy.files import FileBook
from penstock.tenancy.fleet import FleetBook
from penstock.tenancy.keys import ApiKey, NewKey, TenantState, new_key
from penstock.tenancy.lora import AdapterBook
from penstock.tenancy.migrations import migrate
from penstock.tenancy.replicas import ReplicaBook, ReplicaRow, replicas_changed
from penstock.tenancy.responses import ResponseBook
from penstock.tenancy.revisions import next_revision
from penstock.tenancy.rollouts import RolloutBook, rollouts_changed
from penstock.tenancy.routes import RouteBook, RouteRevision, routes_changed
from penstock.tenancy.tenants import Label, Tenant, tenant_from, with_changes
from penstock.tenancy.usage import UsageBook

_READING = "store reader"  # what cannot be read is counted under this name
_KEY_COLUMNS = ", ".join(f"api_keys.{column}" for column in ApiKey.__struct_fields__)
_api_key_converter = Converter(ApiKey)
_tenant_decoder = msgspec.json.Decoder(Tenant)
_label_converter = Converter(Label)


class Changes(Struct, frozen=True):
    revision: int  # what to ask from the next time
    tenants: tuple[TenantState, ...]
    admins: tuple[AdminKey, ...] | None = None  # all of them, if one changed
    routes: tuple[RouteRevision, ...] = ()
    replicas: tuple[ReplicaRow, ...] | None = None  # all of them, if one changed
    rollouts: tuple[RolloutOrder, ...] | None = None  # all that are on, if one changed


class Store:
    """Safe to use from several threads, and by any number of processes at once."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self.admins = AdminBook(database, clock)
        self.adapters = AdapterBook(database)
        self.routes = RouteBook(database, clock)
        self.rollouts = RolloutBook(database, self.routes, clock)
        self.replicas = ReplicaBook(database, clock)
        self.fleet = FleetBook(database, clock)
        self.responses = ResponseBook(database, clock)
        self.files = FileBook(database, clock)
        self.batches = BatchBook(database, clock)
        self.usage = UsageBook(database)

    # Tenants

    def add_tenant(self, values: Mapping[str, Any]) -> Tenant:
        tenant = tenant_from({**values, "created_at": self._clock()})
        with self._database.writing() as execute:
            self._changed(execute, tenant.id)
            if execute("SELECT 1 FROM tenants WHERE id = ?", (tenant.id,)):
                raise Conflict(f"there is a tenant '{tenant.id}' already", param="id")
            execute("INSERT INTO tenants (id, document) VALUES (?, ?)", (tenant.id, _encode(tenant)))
        return tenant

    def tenant(self, tenant_id: str) -> Tenant:
        with self._database.reading() as execute:
            return _tenant(execute, tenant_id)

    def tenants(self) -> list[Tenant]:
        with self._database.reading() as execute:
            return [_decode(id, document) for id, document in execute("SELECT id, document FROM tenants ORDER BY id")]

    def unreadable_tenants(self) -> dict[str, str]:
        """Tenants whose documents or keys this version cannot read, and why: what cannot be read is refused."""
        with self._database.reading() as execute:
            return unreadable_tenants(execute)

    def update_tenant(self, tenant_id: str, values: Mapping[str, Any]) -> Tenant:
        """Changes a tenant as a merge patch does; what two processes change at once is both kept."""
        with self._database.writing() as execute:
            self._changed(execute, tenant_id)
            tenant = with_changes(_tenant(execute, tenant_id), values)
            execute("UPDATE tenants SET document = ? WHERE id = ?", (_encode(tenant), tenant_id))
        return tenant

    def remove_tenant(self, tenant_id: str) -> None:
        """The tenant, its keys, responses, files and batches. What it used stays on record, under its id."""
        with self._database.writing() as execute:
            self._changed(execute, tenant_id)
            _document(execute, tenant_id)
            execute("DELETE FROM tenants WHERE id = ?", (tenant_id,))
            execute("DELETE FROM responses WHERE tenant_id = ?", (tenant_id,))
            self.batches.forget(execute, tenant_id)
            self.files.forget(execute, tenant_id)

    # Keys

    def create_key(self, tenant_id: str, *, name: str = "", expires_at: float | None = None) -> NewKey:
        label = _label(name)
        with self._database.writing() as execute:
            self._changed(execute, tenant_id)
            _tenant(execute, tenant_id)
            key = new_key(tenant_id, now_s=self._clock(), name=label, expires_at=expires_at)
            _insert_key(execute, key.record)
        return key

    def keys(self, tenant_id: str | None = None) -> list[ApiKey]:
        """Oldest first, the revoked ones too."""
        where, parameters = ("WHERE tenant_id = ? ", (tenant_id,)) if tenant_id is not None else ("", ())
        with self._database.reading() as execute:
            if tenant_id is not None:
                _document(execute, tenant_id)
            rows = execute(f"SELECT {_KEY_COLUMNS} FROM api_keys {where}ORDER BY tenant_id, created_at, id", parameters)
        return [ApiKey(*row) for row in rows]

    def revoke_key(self, key_id: str) -> ApiKey:
        """Revokes a key at once, for every gateway. Twice is once."""
        with self._database.writing() as execute:
            key = self._changing_key(execute, key_id)
            return self._end_key(execute, key, grace_s=0)

    def rotate_key(self, key_id: str, *, grace_s: float = 0.0) -> NewKey:
        """A new key in place of this one, which ends at once or is still good for `grace_s`."""
        with self._database.writing() as execute:
            old = self._changing_key(execute, key_id)
            now_s = self._clock()
            if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now_s):
                raise Conflict(f"key {old.prefix} has ended already; create a new one")
            key = new_key(old.tenant_id, now_s=now_s, name=old.name, expires_at=old.expires_at)
            _insert_key(execute, key.record)
            self._end_key(execute, old, grace_s=grace_s)
        return key

    # What changed

    def changes(self, since: int = 0) -> Changes:
        """Every tenant that changed after revision `since`, as it is now; all admins, if one did; routes; all
        replicas, if one did; and all rollouts that are on, if one did."""
        with self._database.reading() as execute:
            revision = execute("SELECT value FROM store_revision")[0][0]
            if revision == since:
                return Changes(revision, ())
            changed = "tenant_changes WHERE tenant_changes.revision > ?"
            ids = execute(f"SELECT tenant_id FROM {changed}", (since,))
            documents: dict[str, str] = dict(
                execute(f"SELECT id, document FROM tenants WHERE id IN (SELECT tenant_id FROM {changed})", (since,))
            )
            keys: dict[str, list[Row]] = {}
            for row in execute(
                f"SELECT {_KEY_COLUMNS} FROM api_keys "
                f"WHERE revoked_at IS NULL AND tenant_id IN (SELECT tenant_id FROM {changed})",
                (since,),
            ):
                keys.setdefault(row[1], []).append(row)
            admins, routes = admins_changed(execute, since), routes_changed(execute, since)
            replicas, rollouts = replicas_changed(execute, since), rollouts_changed(execute, since)
        states = tuple(_state(id, documents.get(id), keys.get(id, ())) for (id,) in ids)
        return Changes(revision, states, admins, routes, replicas, rollouts)

    def watch(self) -> closing[Watch]:
        return closing(self._database.watch())

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _changed(self, execute: Execute, tenant_id: str) -> None:
        """First in every change."""
        execute(
            "INSERT INTO tenant_changes (tenant_id, revision) VALUES (?, ?) "
            "ON CONFLICT (tenant_id) DO UPDATE SET revision = excluded.revision",
            (tenant_id, next_revision(self._database, execute)),
        )

    def _changing_key(self, execute: Execute, key_id: str) -> ApiKey:
        """A key's tenant never changes, so it may be read before the lock; the rest is read after it."""
        if not (found := execute("SELECT tenant_id FROM api_keys WHERE id = ?", (key_id,))):
            raise KeyNotFound(f"there is no key psk_{key_id}")
        self._changed(execute, found[0][0])
        rows = execute(f"SELECT {_KEY_COLUMNS} FROM api_keys WHERE id = ?", (key_id,))
        if not rows:  # its tenant was removed in between
            raise KeyNotFound(f"there is no key psk_{key_id}")
        return ApiKey(*rows[0])

    def _end_key(self, execute: Execute, key: ApiKey, *, grace_s: float) -> ApiKey:
        now_s = self._clock()
        if grace_s > 0:
            ended = msgspec.structs.replace(key, expires_at=min(now_s + grace_s, key.expires_at or float("inf")))
        else:
            ended = msgspec.structs.replace(key, revoked_at=key.revoked_at or now_s)
        execute(
            "UPDATE api_keys SET expires_at = ?, revoked_at = ? WHERE id = ?",
            (ended.expires_at, ended.revoked_at, key.id),
        )
        return ended


def open_store(url: str) -> Store:
    """The store at this URL, its schema up to date."""
    database = open_database(url)
    try:
        migrate(database)
    except PenstockError:
        database.close()
        raise
    return Store(database)


def open_database(url: str) -> Database:
    scheme, _, path = url.partition("://")
    if scheme == "sqlite" and path.startswith("/") and len(path) > 1:
        from penstock.tenancy.sqlite import SqliteDatabase

        return SqliteDatabase(Path(path[1:]).expanduser())
    if scheme in ("postgresql", "postgres"):
        try:
            from penstock.tenancy.postgres import PostgresDatabase
        except ImportError:
            raise ConfigError("a PostgreSQL store needs psycopg: pip install 'penstock[postgres]'") from None
        return PostgresDatabase(url)
    raise ConfigError(
        f"'{redact(url)}' is no store: it is sqlite:///path or postgresql://user@host/name", param="store"
    )


def _document(execute: Execute, tenant_id: str) -> str:
    if not (rows := execute("SELECT document FROM tenants WHERE id = ?", (tenant_id,))):
        raise TenantNotFound(f"there is no tenant '{tenant_id}'")
    return str(rows[0][0])


def _tenant(execute: Execute, tenant_id: str) -> Tenant:
    return _decode(tenant_id, _document(execute, tenant_id))


def _state(tenant_id: str, document: str | None, rows: Iterable[Row]) -> TenantState:
    """A tenant that cannot be read is closed: as long as nobody knows what it may do, it may do nothing."""
    if document is None:
        return TenantState(tenant_id, None)
    keys = []
    for row in rows:
        try:
            keys.append(_key(row))
        except StoreCorrupt as error:
            count_error(_READING, error)
    try:
        tenant = _decode(tenant_id, document)
    except StoreCorrupt as error:
        count_error(_READING, error)
        tenant = Tenant(tenant_id, is_active=False)
    return TenantState(tenant_id, tenant, tuple(keys))


def unreadable_tenants(execute: Execute) -> dict[str, str]:
    found: dict[str, str] = {}
    for id, document in execute("SELECT id, document FROM tenants ORDER BY id"):
        try:
            _decode(id, document)
        except StoreCorrupt as error:
            found[id] = error.message
    for row in execute(f"SELECT {_KEY_COLUMNS} FROM api_keys WHERE revoked_at IS NULL"):
        try:
            _key(row)
        except StoreCorrupt as error:
            found[row[1]] = error.message
    return found


def _key(row: Row) -> ApiKey:
    try:
        return _api_key_converter.convert(dict(zip(ApiKey.__struct_fields__, row, strict=True)))
    except msgspec.ValidationError as error:
        raise StoreCorrupt(f"key psk_{row[0]} of tenant '{row[1]}' cannot be read: {error}") from None


def _insert_key(execute: Execute, key: ApiKey) -> None:
    columns = ApiKey.__struct_fields__
    execute(
        f"INSERT INTO api_keys ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
        msgspec.structs.astuple(key),
    )


def _encode(tenant: Tenant) -> str:
    return msgspec.json.encode(tenant).decode()


def _decode(tenant_id: str, document: str) -> Tenant:
    try:
        return _tenant_decoder.decode(document)
    except (ValueError, TypeError) as error:  # msgspec's and Unicode's; a column may hold what is no text
        raise StoreCorrupt(f"the document of tenant '{tenant_id}' cannot be read: {error}") from None


def _label(text: str) -> str:
    try:
        return _label_converter.convert(text)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"name: {error}", param="name") from None
