"""The way of a batch's row into the gateway: as a request of its tenant, in the lowest class, with its own bill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.core.errors import PenstockError, PermissionDenied
from penstock.core.request import Priority
from penstock.gateway.batches import spare
from penstock.gateway.batches.spare import Seen
from penstock.gateway.proxy import refusals
from penstock.gateway.proxy.request_view import SURFACES
from penstock.http.exchange import Exchange
from penstock.tenancy.keys import Caller
from penstock.tenancy.tenants import PriorityClass, Tenant
from penstock.tenancy.usage import Recorder

if TYPE_CHECKING:
    from penstock.gateway.app import Gateway

_MAX_TENANTS = 1000


class GatewayRows:
    def __init__(self, gateway: Gateway, busy: float) -> None:
        self._gateway = gateway
        self._busy = busy
        self._tenants: dict[str, tuple[Tenant, Tenant]] = {}  # as they are, and as their rows are sent

    def caller(self, tenant_id: str, key_id: str) -> Caller | None:
        tenant = self._gateway.services.tenant(tenant_id)
        if tenant is None:
            return None
        if not tenant.is_active:
            raise PermissionDenied(f"tenant '{tenant_id}' is not active")
        known = self._tenants.get(tenant_id)
        if known is None or known[0] is not tenant:  # the same object each time: much is worked out once for each
            if len(self._tenants) >= _MAX_TENANTS:
                self._tenants.clear()
            known = self._tenants[tenant_id] = (tenant, replace(tenant, priority=PriorityClass.BATCH))
        return Caller(known[1], key_id, is_batch=True)

    def pool(self, model: str, caller: Caller) -> str:
        """Pool of the model. A pipeline's is that of the first model that its steps ask, if they ask any."""
        gateway = self._gateway
        asked = gateway.models_behind(gateway.route_for(caller.tenant, model))
        return next((target.pool for route in asked for target in route.targets() if target.pool), "")

    def look(self, pool: str) -> Seen:
        admission, now = self._gateway.admission, self._gateway.now()
        num_waiting = sum(admission.num_waiting(pool, priority) for priority in (Priority.HIGH, Priority.NORMAL))
        if not pool:
            return Seen(num_waiting=0, room=1)  # of a model that is not there: its rows are refused, and cost nothing
        if not admission.has_active(pool, now):
            return Seen(num_waiting, 0, is_cold=admission.hold_s(pool, now) > 0)
        room = spare.room(admission.replicas(pool), admission.slo(pool).ttft_s, self._busy, now)
        return Seen(num_waiting, room)

    def begin(self, exchange: Exchange, row_id: str, caller: Caller, ledger: Recorder) -> None:
        surface = SURFACES[exchange.request.path]
        try:
            self._gateway.enter(exchange, surface, row_id, caller, ledger)
        except PenstockError as error:
            refusals.respond(exchange, surface.convention, error, row_id)
