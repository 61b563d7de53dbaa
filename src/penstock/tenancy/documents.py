"""Tenants, keys, usage and routes as commands and the admin API show them to programs. Hashes stay in the store."""

from __future__ import annotations

import time
from typing import Any, Literal

from penstock.core.errors import InvalidValue
from penstock.tenancy.keys import ApiKey, NewKey
from penstock.tenancy.prices import NANOS
from penstock.tenancy.routes import RouteInForce
from penstock.tenancy.store import Store
from penstock.tenancy.tenants import Tenant
from penstock.tenancy.times import month_began_s
from penstock.tenancy.usage import HOUR_S, UsageSum

Document = dict[str, Any]
Step = Literal["hour", "day", "all"]
STEPS: tuple[Step, ...] = ("hour", "day", "all")
SUMMED = ("requests", "input_tokens", "cached_tokens", "output_tokens", "device_us", "kv_block_ms", "cost_nanos")
_WHOLE = {"device_us": ("device_s", 1_000_000), "kv_block_ms": ("kv_block_s", 1000), "cost_nanos": ("cost", NANOS)}


def tenant_document(tenant: Tenant) -> Document:
    """Every field, the defaults too."""
    fields = {name: getattr(tenant, name) for name in Tenant.__struct_fields__}
    for section in ("limits", "budget"):
        fields[section] = {name: getattr(fields[section], name) for name in fields[section].__struct_fields__}
    return fields


def key_document(key: ApiKey) -> Document:
    return {name: getattr(key, name) for name in ApiKey.__struct_fields__ if name != "hash"}


def new_key_document(key: NewKey) -> Document:
    """The one place that shows a key."""
    return {"key": key.secret, **key_document(key.record)}


def route_document(route: RouteInForce) -> Document:
    """Shares by version, as every gateway has them in force within a moment."""
    last = route.last
    return {
        "name": route.declared.name,
        "weights": route.weights,
        "shadow": route.shadow,
        "revision": last.revision,
        "action": last.action,
        "by": last.by,
        "at": last.at or None,
        "file": {"weights": route.declared.weights, "shadow": route.declared.shadow},
    }


class UsageReport:
    """A tenant's usage from a time on (this month's beginning) until another (now)."""

    def __init__(
        self,
        store: Store,
        tenant_id: str,
        *,
        by: Step = "day",
        since_s: float | None = None,
        until_s: float | None = None,
    ) -> None:
        now_s = time.time()
        self._tenant_id = tenant_id
        self._since_s = month_began_s(now_s) if since_s is None else since_s
        self.by = by
        self.sums = store.usage.sums(
            tenant_id, since_s=self._since_s, until_s=now_s + HOUR_S if until_s is None else until_s, by=by
        )
        if not self.sums:
            store.tenant(tenant_id)  # nothing used, or no such tenant?
        self.total = {name: sum(getattr(one, name) for one in self.sums) for name in SUMMED}

    def document(self) -> Document:
        rows = [self._row(one) for one in self.sums]
        return {"tenant": self._tenant_id, "since": _iso(self._since_s), "usage": rows, "total": _shown(self.total)}

    def _row(self, one: UsageSum) -> Document:
        counts = _shown({name: getattr(one, name) for name in SUMMED})
        return {**({} if self.by == "all" else {"start": _iso(one.start_s)}), "model": one.model, **counts}


def step_from(text: str) -> Step:
    for step in STEPS:
        if text == step:
            return step
    raise InvalidValue(f"usage is summed by one of {', '.join(STEPS)}", param="by")


def _shown(counts: dict[str, int]) -> Document:
    """Returns the counts in seconds and money, not in the fractions that are kept."""
    whole = {name: _WHOLE.get(name, (name, 1)) for name in counts}
    return {shown: counts[name] / unit if unit > 1 else counts[name] for name, (shown, unit) in whole.items()}


def _iso(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
