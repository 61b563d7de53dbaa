"""API keys: made once, shown once, kept as a hash; and the ring of them that every request is looked up in.

A key is `psk_<id>_<secret>`. The id is no secret: it names the key in lists and logs. The secret has 190 random bits,
so one SHA-256 is enough at rest: slow hashes protect secrets that people choose, and nobody can guess these. The ring
finds a key by its hash. What a lookup compares is never the secret but its hash, which a caller can neither choose nor
steer towards a stored one, so its timing tells nothing. Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated

from msgspec import Meta, Struct

from penstock.core.errors import InvalidValue, PermissionDenied, Unauthenticated
from penstock.tenancy.tenants import Tenant

_ALPHABET = string.ascii_letters + string.digits  # nothing that ends a word: a double click selects the whole key
ID_LENGTH = 10
SECRET_LENGTH = 32
_KEY = re.compile(rf"psk_([0-9A-Za-z]{{{ID_LENGTH}}})(?:_[0-9A-Za-z]*)?")


class ApiKey(Struct, frozen=True, omit_defaults=True):
    """The record that is kept of a key. It can recognise the key and cannot reproduce it."""

    id: str
    tenant_id: str
    hash: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # SHA-256 of the whole key, in hex
    name: str = ""  # for people
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    @property
    def prefix(self) -> str:
        """The part of the key that may be shown."""
        return f"psk_{self.id}"


class NewKey(Struct, frozen=True):
    secret: str  # the key itself; this object is the only place that has it
    record: ApiKey

    def __repr__(self) -> str:
        return f"NewKey({self.record.prefix}_…)"


class Caller(Struct, frozen=True, gc=False):
    """The tenant and the key that a request came with."""

    tenant: Tenant
    key_id: str
    expires_at: float = float("inf")
    is_batch: bool = False  # a row of a batch: at the price of batches, and nobody waits for it
    step_of: str = ""  # the request of a pipeline that this is a step of: its limits are those of the whole


class TenantState(Struct, frozen=True):
    """One tenant as a change feed tells it: as it is now, with the keys that are not revoked. None: it is gone."""

    tenant_id: str
    tenant: Tenant | None
    keys: tuple[ApiKey, ...] = ()


def new_key(tenant_id: str, *, now_s: float, name: str = "", expires_at: float | None = None) -> NewKey:
    key_id, random = random_text(ID_LENGTH), random_text(SECRET_LENGTH)
    secret = f"psk_{key_id}_{random}"
    record = ApiKey(key_id, tenant_id, sha256(secret.encode()).hexdigest(), name, now_s, expires_at)
    return NewKey(secret, record)


def key_id_of(text: str) -> str:
    """The id in whatever somebody has of a key: its id, its prefix or all of it."""
    if found := _KEY.fullmatch(text):
        return found[1]
    if len(text) == ID_LENGTH and text.isalnum() and text.isascii():
        return text
    raise InvalidValue("that is no key id: it looks like psk_ and ten letters and digits, as `keys list` shows")


class KeyRing:
    """Every usable key in memory. Belongs to one thread: the one that answers requests."""

    def __init__(self) -> None:
        self._callers: dict[bytes, Caller] = {}
        self._hashes: dict[str, list[bytes]] = {}  # of each tenant; a tenant without keys has an empty list
        self.has_had_tenants = False  # never False again: removing the last tenant must not open the door to everybody

    def authenticate(self, key: bytes, now_s: float) -> Caller:
        """Returns the caller whose key this is, at `now_s` of wall-clock time."""
        caller = self._callers.get(sha256(key).digest())
        if caller is None or now_s >= caller.expires_at:
            raise Unauthenticated("this API key is not known; it may have been revoked or have expired")
        if not caller.tenant.is_active:
            raise PermissionDenied(f"tenant '{caller.tenant.id}' is not active")
        return caller

    def tenants(self) -> dict[str, Tenant]:
        """Those that have a key, by id."""
        return {caller.tenant.id: caller.tenant for caller in self._callers.values()}

    def tenant(self, tenant_id: str) -> Tenant | None:
        """One that has a key; None: there is none."""
        hashes = self._hashes.get(tenant_id)
        return self._callers[hashes[0]].tenant if hashes else None

    def apply(self, states: Iterable[TenantState]) -> None:
        for state in states:
            for stale in self._hashes.pop(state.tenant_id, ()):
                del self._callers[stale]
            if state.tenant is not None:
                self.has_had_tenants = True
                self._add(state.tenant, state.keys)

    def _add(self, tenant: Tenant, keys: Iterable[ApiKey]) -> None:
        added = self._hashes[tenant.id] = []
        for key in keys:
            digest = bytes.fromhex(key.hash)
            self._callers[digest] = Caller(tenant, key.id, float("inf") if key.expires_at is None else key.expires_at)
            added.append(digest)


def random_text(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
