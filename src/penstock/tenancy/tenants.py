"""Tenants: their names, what they may use, and how much. Plain data that knows no store, key or clock.

Allow-lists hold names or shell patterns (`llama-*`) and mean what they say: an empty list allows nothing, so taking the
last entry away never opens a door. A new tenant may use every model (`*`) and no adapter: an adapter is often another
tenant's own, so each one is granted by name.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct

from penstock.core.config import nearest
from penstock.core.converter import Converter
from penstock.core.errors import InvalidValue
from penstock.core.request import Priority
from penstock.core.watermark import Name

TenantId = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}\Z")]
Count = Annotated[int, Meta(ge=1, le=2**53)]
Label = Annotated[str, Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*\Z")]  # shown to people: no control characters
Weight = Annotated[float, Meta(ge=0.01, le=1000)]
Money = Annotated[float, Meta(gt=0, le=1e9)]  # of whatever currency the prices are in


class PriorityClass(enum.StrEnum):
    """The urgency of a tenant's requests: the names people use, and what the queues and the engine make of them."""

    INTERACTIVE = "interactive"  # somebody is waiting
    STANDARD = "standard"
    BATCH = "batch"  # first to wait, first to be shed

    @property
    def priority(self) -> Priority:
        return _PRIORITIES[self]


class CacheScope(enum.StrEnum):
    """The reach of a tenant's prefix cache: whose prompts its own may find there."""

    OWN = "own"  # nobody else can see, not even by the time an answer takes, what the tenant has asked
    SHARED = "shared"  # with all other tenants that share


_PRIORITIES = {
    PriorityClass.INTERACTIVE: Priority.HIGH,
    PriorityClass.STANDARD: Priority.NORMAL,
    PriorityClass.BATCH: Priority.LOW,
}


class Limits(Struct, frozen=True, omit_defaults=True):
    """Use at once and per minute, that is in any 60 seconds. None: no limit."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    smooth: bool = False  # a sixth of them at once and the rest over the minute, not all of it at once
    concurrency: Count | None = None
    max_input: Count | None = None  # tokens of one request's prompt
    max_output: Count | None = None  # tokens of one request's answer


class Budget(Struct, frozen=True, omit_defaults=True):
    """Bounds of use per calendar day and month (UTC). None: no bound. Money needs prices to be configured."""

    tokens_per_day: Count | None = None
    tokens_per_month: Count | None = None
    money_per_day: Money | None = None
    money_per_month: Money | None = None

    @property
    def is_bounded(self) -> bool:
        return self != _UNBOUNDED


_UNBOUNDED = Budget()


class Tenant(Struct, frozen=True, omit_defaults=True):
    id: TenantId  # never changes: usage, caches and logs are kept under it
    name: Label = ""  # for people
    limits: Limits = Limits()
    budget: Budget = Budget()
    models: tuple[Label, ...] = ("*",)
    adapters: tuple[Label, ...] = ()
    priority: PriorityClass = PriorityClass.STANDARD
    weight: Weight = 1.0  # of its share of a replica that others use too
    cache: CacheScope = CacheScope.OWN
    watermark: Name | None = None  # of its answers; its secret is at the replicas
    route_headers: bool = False  # x-penstock-route in its answers, which tells how busy the fleet is
    stays: bool = False  # in a rollout it stays with the old version, until the new one is everybody's
    is_active: bool = True  # not active: its keys are refused
    created_at: float = 0.0  # seconds since 1970, set by the store

    def may_use_model(self, name: str) -> bool:
        return _allows(self.models, name)

    @property
    def namespace(self) -> str:
        """The tenant's namespace in the prefix cache."""
        return self.id if self.cache is CacheScope.OWN else ""

    def may_use_adapter(self, name: str) -> bool:
        return _allows(self.adapters, name)


_tenant_converter = Converter(Tenant)


@lru_cache(maxsize=4096)
def _allows(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def tenant_from(values: Mapping[str, Any]) -> Tenant:
    """A tenant from plain values of outside, checked; an unknown key is an error that names the nearest known one."""
    for section, kind in ((None, Tenant), ("limits", Limits), ("budget", Budget)):
        _refuse_unknown(values if section is None else values.get(section, {}), kind, section)
    try:
        return _tenant_converter.convert(values)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"tenant: {error}") from None


def with_changes(tenant: Tenant, values: Mapping[str, Any]) -> Tenant:
    """The tenant with these values in place of its own, as in a merge patch: sections merge, None clears a limit."""
    merged: dict[str, Any] = msgspec.to_builtins(tenant)
    for key, value in values.items():
        old = merged.get(key, UNSET)
        is_section = key in ("limits", "budget") and isinstance(value, Mapping)
        merged[key] = {**(old if isinstance(old, dict) else {}), **value} if is_section else value
    changed = tenant_from(merged)
    if changed.id != tenant.id:
        raise InvalidValue("a tenant's id never changes", param="id")
    return changed


def _refuse_unknown(values: object, kind: type[Struct], section: str | None) -> None:
    if not isinstance(values, Mapping):
        return  # the conversion says what is wrong with it
    known = kind.__struct_fields__
    for key in values:
        if key not in known:
            hint = nearest(str(key), known)
            path = f"{section}.{key}" if section else str(key)
            raise InvalidValue(
                f"tenant: unknown field '{path}'" + (f"; did you mean '{hint}'?" if hint else ""), param=path
            )
