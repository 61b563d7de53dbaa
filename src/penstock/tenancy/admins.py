"""Admin keys, `psa_<id>_<secret>`: kept and followed as tenants' keys are (see keys.py).

An admin has a name and one key. A name is free again once its key is revoked; the record stays. A tenant's key is none
of these and these are no tenant's: the two rings know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from penstock.core.converter import Converter
from penstock.core.errors import Conflict, InvalidValue, KeyNotFound, Unauthenticated
from penstock.observe.background import count_error
from penstock.tenancy.database import Database, Execute, Row
from penstock.tenancy.keys import ID_LENGTH, SECRET_LENGTH, random_text
from penstock.tenancy.revisions import next_revision
from penstock.tenancy.tenants import TenantId

_tenant_id_converter = Converter(TenantId)


class AdminKey(Struct, frozen=True):
    id: str
    name: str
    hash: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # SHA-256 of the whole key, in hex
    created_at: float = 0.0
    revoked_at: float | None = None

    @property
    def prefix(self) -> str:
        """The part of the key that may be shown."""
        return f"psa_{self.id}"


_admin_key_converter = Converter(AdminKey)


class NewAdminKey(Struct, frozen=True):
    secret: str  # the key itself; this object is the only place that has it
    record: AdminKey

    def __repr__(self) -> str:
        return f"NewAdminKey({self.record.prefix}_…)"


def new_admin_key(name: str, *, now_s: float) -> NewAdminKey:
    key_id = random_text(ID_LENGTH)
    secret = f"psa_{key_id}_{random_text(SECRET_LENGTH)}"
    return NewAdminKey(secret, AdminKey(key_id, name, sha256(secret.encode()).hexdigest(), now_s))


class AdminRing:
    """Every admin's key in memory. Belongs to one thread: the one that answers requests."""

    def __init__(self) -> None:
        self._admins: dict[bytes, AdminKey] = {}
        self.has_had_admins = False  # never False again: revoking the last must not open the door to everybody

    def authenticate(self, key: bytes) -> AdminKey:
        admin = self._admins.get(sha256(key).digest())
        if admin is None:
            raise Unauthenticated("this admin key is not known; it may have been revoked")
        return admin

    def apply(self, keys: Iterable[AdminKey]) -> None:
        """All there ever were, as they are now."""
        self._admins = {}
        for key in keys:
            self.has_had_admins = True
            if key.revoked_at is None:
                self._admins[bytes.fromhex(key.hash)] = key


class AdminBook:
    """The store's part of it. Blocks: for commands and for threads of their own."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def add(self, name: str) -> NewAdminKey:
        try:
            _tenant_id_converter.convert(name)
        except msgspec.ValidationError:
            raise InvalidValue("an admin's name is of lower-case letters, digits, . _ -", param="name") from None
        with self._database.writing() as execute:
            revision = next_revision(self._database, execute)
            if execute("SELECT 1 FROM admin_keys WHERE name = ? AND revoked_at IS NULL", (name,)):
                raise Conflict(f"there is an admin '{name}' already", param="name")
            key = new_admin_key(name, now_s=self._clock())
            execute(
                f"INSERT INTO admin_keys ({_COLUMNS}, revision) VALUES (?, ?, ?, ?, ?, ?)",
                (*msgspec.structs.astuple(key.record), revision),
            )
        return key

    def all(self) -> list[AdminKey]:
        """Oldest first, the revoked ones too."""
        with self._database.reading() as execute:
            return _all(execute)

    def revoke(self, which: str) -> AdminKey:
        """Revokes a key by name, or by as much of it as somebody has: at once, for every gateway; twice is once."""
        column, value = ("id", which.split("_")[1]) if which.startswith("psa_") else ("name", which)
        with self._database.writing() as execute:
            revision = next_revision(self._database, execute)
            order = "revoked_at IS NULL DESC, created_at DESC"
            found = execute(f"SELECT {_COLUMNS} FROM admin_keys WHERE {column} = ? ORDER BY {order}", (value,))
            if not found:
                raise KeyNotFound(f"there is no admin with that {column}")
            key = AdminKey(*found[0])
            if key.revoked_at is None:
                key = msgspec.structs.replace(key, revoked_at=self._clock())
                execute(
                    "UPDATE admin_keys SET revoked_at = ?, revision = ? WHERE id = ?",
                    (key.revoked_at, revision, key.id),
                )
        return key


def admins_changed(execute: Execute, since: int) -> tuple[AdminKey, ...] | None:
    """All of them, if one has changed after revision `since`: they are few. None: none has."""
    if not execute("SELECT 1 FROM admin_keys WHERE revision > ? LIMIT 1", (since,)):
        return None
    return tuple(_all(execute))


def _all(execute: Execute) -> list[AdminKey]:
    return [_read(row) for row in execute(f"SELECT {_COLUMNS} FROM admin_keys ORDER BY created_at, id")]


def _read(row: Row) -> AdminKey:
    """One that cannot be read is as good as revoked."""
    try:
        return _admin_key_converter.convert(dict(zip(AdminKey.__struct_fields__, row, strict=True)))
    except msgspec.ValidationError as error:
        count_error("store reader", error)
        return AdminKey(str(row[0]), str(row[1]), "", revoked_at=0.0)


_COLUMNS = ", ".join(AdminKey.__struct_fields__)
