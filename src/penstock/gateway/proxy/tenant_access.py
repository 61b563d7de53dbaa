"""Access of a tenant: worked out once for each, not for every request. Knows no clock and no socket."""

from __future__ import annotations

from penstock.gateway.rollouts.following import Rollouts
from penstock.router.routes import Route, RouteTable
from penstock.tenancy.limits.quota import Quota, Rate
from penstock.tenancy.tenants import PriorityClass, Tenant

_MOST = 10_000


class TenantAccess:
    __slots__ = ("has_budget", "models", "namespace", "priority", "quota", "routes", "tenant")

    def __init__(self, tenant: Tenant, routes: RouteTable) -> None:
        self.tenant = tenant
        self.routes = routes  # as its requests are routed by
        self.models = [name for name, route in routes.routes.items() if _may_use(tenant, route)]  # what exists for it
        self.namespace = tenant.namespace  # of the prefix cache
        self.priority = tenant.priority.priority
        self.has_budget = tenant.budget.is_bounded
        self.quota = _quota(tenant)  # None: nothing is limited, and the limiter need not be asked


class TenantAccesses:
    def __init__(self, routes: RouteTable, rollouts: Rollouts) -> None:
        self._routes = routes
        self._rollouts = rollouts
        self._known: dict[tuple[str, PriorityClass], TenantAccess] = {}  # rows of batches are of another class

    def of(self, tenant: Tenant) -> TenantAccess:
        key = tenant.id, tenant.priority
        found = self._known.get(key)
        if found is None or found.tenant is not tenant:  # a tenant that changes is another object
            if len(self._known) >= _MOST:
                self._known.clear()
            found = self._known[key] = TenantAccess(tenant, self._rollouts.routes_for(tenant, self._routes))
        return found


def _may_use(tenant: Tenant, route: Route) -> bool:
    """An adapter is allowed by its own name, and only where its model is too."""
    if route.adapter_of is None:
        return tenant.may_use_model(route.name)
    return tenant.may_use_model(route.adapter_of) and tenant.may_use_adapter(route.name)


def _quota(tenant: Tenant) -> Quota | None:
    limits = tenant.limits
    quota = Quota(
        requests=Rate(limits.requests_per_minute, limits.smooth) if limits.requests_per_minute else None,
        tokens=Rate(limits.tokens_per_minute, limits.smooth) if limits.tokens_per_minute else None,
        concurrency=limits.concurrency,
    )
    return None if quota == Quota() else quota
