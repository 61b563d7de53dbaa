"""Keys, limits, budgets and usage: what the gateway uses of tenancy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.api.page_guard import PageGuard
from penstock.core.errors import Unauthenticated
from penstock.gateway.replicas.lora import AdapterNotes, ForgetfulNotes
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.keys import Caller, KeyRing
from penstock.tenancy.limits.limiter import Limiter
from penstock.tenancy.prices import Price
from penstock.tenancy.tenants import CacheScope, Tenant
from penstock.tenancy.usage import Recorder

ANYBODY = Caller(Tenant(id="anonymous", adapters=("*",), cache=CacheScope.SHARED, route_headers=True), key_id="")


@dataclass(frozen=True)
class TenantServices:
    keys: KeyRing
    limiter: Limiter
    budgets: Budgets
    ledger: Recorder
    prices: Mapping[str, Price] = field(default_factory=dict)  # by pool
    adapters: AdapterNotes = field(default_factory=ForgetfulNotes)
    pages: PageGuard = field(default_factory=PageGuard)  # for as long as anybody is let in

    def tenant(self, tenant_id: str) -> Tenant | None:
        """One by its id, for work of its that no request asks for; None: it is gone."""
        found = self.keys.tenant(tenant_id) if self.keys.has_had_tenants else ANYBODY.tenant
        return found if found is not None and found.id == tenant_id else None

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """The caller, by the key in these headers; before there are tenants, anybody but a foreign web page."""
        if not self.keys.has_had_tenants:
            self.pages.check(headers)
            return ANYBODY
        offered = headers.get(b"authorization", b"")
        key = offered[7:] if offered[:7].lower() == b"bearer " else headers.get(b"x-api-key")
        if not key:
            raise Unauthenticated("an API key is needed: Authorization: Bearer psk_… or x-api-key")
        return self.keys.authenticate(key.strip(), time.time())
