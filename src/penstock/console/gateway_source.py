"""The console's data of a gateway. Runs in the event loop, once a second, and changes nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from msgspec.structs import asdict as fields_of
from msgspec.structs import replace

from penstock.admission.settings import CLASS_NAMES, AdmissionSettings
from penstock.console.history import Backlog
from penstock.console.pipelines import StepCounts
from penstock.console.reports import CacheHits, Production
from penstock.console.views import ModelRow, QueueRow, ReplicaRow, State, TenantRow
from penstock.core.replica import ReplicaState
from penstock.gateway.app import Gateway
from penstock.gateway.monitor.state import ReplicaView, state_of
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.replicas.replica_set import Subscriber
from penstock.gateway.tenant_services import ANYBODY
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.prices import FREE, NANOS
from penstock.tenancy.tenants import Tenant
from penstock.tenancy.usage import periods

_MAX_TENANTS = 1000  # counted by name
_SHOWN_TENANTS = 50
_TENANTS_S = 5.0  # how often the tenants are gone through: there may be thousands
_QUEUE_LIMITS = {name: AdmissionSettings().classes[priority].max_length for name, priority in CLASS_NAMES.items()}


class _Used:
    """The usage of one tenant since this process began."""

    __slots__ = ("cached", "cost", "device_s", "input", "output", "refused", "requests")

    def __init__(self) -> None:
        self.requests = self.refused = self.input = self.cached = self.output = 0
        self.cost = self.device_s = 0.0


class GatewaySource(Subscriber):
    kind = "gateway"

    def __init__(self, gateway: Gateway, keys: KeyRing, budgets: Budgets) -> None:
        self._gateway = gateway
        self._keys = keys
        self._budgets = budgets
        self._used: dict[str, _Used] = {}
        self._made: dict[str, Production] = {}
        self._hits: dict[str, CacheHits] = {}
        self._names: dict[str, str] = {}
        self._tenants: list[TenantRow] = []
        self._tenants_at_s = 0.0
        self._steps = StepCounts()
        gateway.replicas.subscribe(self)

    def replica_added(self, replica: Replica) -> None:
        self._names[replica.id] = replica.name

    def replica_removed(self, replica: Replica) -> None:
        del self._names[replica.id]
        self._hits.pop(replica.id, None)
        self._made.pop(replica.id, None)

    # -- facts

    def ended(self, facts: RequestFacts) -> None:
        if facts.replica in self._names:
            hits = self._hits.get(facts.replica)
            if hits is None:
                hits = self._hits[facts.replica] = CacheHits()
            hits.add(facts)
        if facts.steps:
            self._steps.add(facts.model, facts.steps)
        if not facts.tenant:
            return
        used = self._used.get(facts.tenant)
        if used is None:
            if len(self._used) >= _MAX_TENANTS:
                return
            used = self._used[facts.tenant] = _Used()
        if not facts.step_of:  # the whole counts once
            used.requests += 1
            used.refused += facts.ending is Ending.REFUSED
        if facts.steps:  # tokens and costs are told with each of them
            return
        used.input += facts.input_tokens
        used.cached += facts.cached_tokens
        used.output += facts.output_tokens
        used.cost += facts.cost or 0.0
        used.device_s += facts.device_s or 0.0

    def names(self) -> dict[str, str]:
        return self._names

    def says_output(self, replica_id: str) -> bool:
        replica = self._gateway.replicas.by_id.get(replica_id)
        return replica is not None and replica.report is not None

    # -- the moment

    def backlogs(self, now_s: float) -> dict[str, Backlog]:
        waiting = self._gateway.admission.num_waiting
        by_model: dict[str, list[Replica]] = {}
        for replica in self._gateway.replicas.values():
            by_model.setdefault(replica.model, []).append(replica)
        return {
            model: Backlog(
                waiting(model),
                sum(len(one.in_flight) for one in own),
                _kv_share(own, self._gateway.now()),
                sum(self._since_last(one, now_s) for one in own),
            )
            for model, own in by_model.items()
        }

    def state(self, now_s: float) -> State:
        gateway = self._gateway
        views = state_of(gateway.replicas.values(), gateway.pools, gateway.admission, gateway.now())
        if now_s - self._tenants_at_s >= _TENANTS_S:
            self._tenants_at_s = now_s
            self._tenants = self._tenant_rows(now_s)
        return State(
            self._models(),
            [self._row(replica, view) for replica, view in zip(gateway.replicas.values(), views.replicas, strict=True)],
            [QueueRow(queue.model, queue.waiting, _QUEUE_LIMITS) for queue in views.queues],
            self._tenants,
            self._steps.rows(),
        )

    def _since_last(self, replica: Replica, now_s: float) -> int:
        report = replica.report
        if report is None:
            return 0
        made = self._made.get(replica.id)
        if made is None:
            self._made[replica.id] = Production(report, now_s)
            return 0
        return made.since_last(report, now_s)

    def _row(self, replica: Replica, view: ReplicaView) -> ReplicaRow:
        report, made, hits = replica.report, self._made.get(replica.id), self._hits.get(replica.id)
        is_out = view.state == ReplicaState.OUT  # its last report says nothing of now
        row = ReplicaRow(
            id=view.id,
            name=replica.name,
            model=view.model,
            kind=_kind(replica),
            state=view.state,
            breaker=view.breaker,
            share=round(view.share, 3),
            running=0 if is_out else view.running,
            waiting=0 if is_out else view.waiting,
            in_flight=view.in_flight,
            kv_used=0 if is_out else view.kv_active_tokens,
            kv_capacity=None if is_out else view.kv_capacity_tokens,
            hit_rate=hits.rate if hits is not None else None,
            heard_s_ago=view.heard_s_ago,
            source=view.source,
            is_draining=view.is_draining,
            role=view.role,
        )
        if report is None:
            return row
        state = report.state if is_out and report.state != "ready" else row.state
        row = replace(row, state=state, restarts=report.restarts, version=report.version)
        if is_out:
            return row
        limits = report.measured.limits
        return replace(
            row,
            max_sequences=limits.max_sequences or None,
            kv_capacity=limits.kv_capacity_tokens or None,
            tokens_per_s=made.rate if made is not None else None,
            step_s=report.measured.speeds.decode_step_s,
            parallelism=report.measured.device.parallelism,
            ranks=report.measured.device.ranks,
            tensors=tuple(one for one in report.tensors if one.model == report.model or one.model == view.model),
        )

    def _models(self) -> list[ModelRow]:
        return [
            ModelRow(
                route.name,
                route.aliases,
                tuple(share.pool for share in route.pools),
                any(self._has_price(share.pool) for share in route.pools),
            )
            for route in self._gateway.routes.routes.values()
        ]

    # -- tenants

    def _tenant_rows(self, now_s: float) -> list[TenantRow]:
        tenants = self._keys.tenants()
        for tenant_id in self._used.keys() - tenants.keys():
            tenants[tenant_id] = ANYBODY.tenant if tenant_id == ANYBODY.tenant.id else Tenant(tenant_id)
        day, month = periods(now_s)
        spent = {id_: self._budgets.spent(id_, month) for id_ in tenants}
        shown = heapq.nlargest(
            _SHOWN_TENANTS, tenants.values(), key=lambda one: (spent[one.id].cost_nanos, spent[one.id].tokens)
        )
        return [self._tenant_row(tenant, day, month) for tenant in shown]

    def _tenant_row(self, tenant: Tenant, day: str, month: str) -> TenantRow:
        used = self._used.get(tenant.id) or _Used()
        today, this_month = (self._budgets.spent(tenant.id, period) for period in (day, month))
        return TenantRow(
            tenant.id,
            tenant.name,
            tenant.priority.value,
            tenant.is_active,
            used.requests,
            used.refused,
            used.input,
            used.cached,
            used.output,
            used.device_s,
            used.cost,
            today.tokens,
            today.cost_nanos / NANOS,
            this_month.tokens,
            this_month.cost_nanos / NANOS,
            this_month.device_us / 1e6,
            {name: value for name, value in fields_of(tenant.budget).items() if value is not None},
        )

    def _has_price(self, pool: str) -> bool:
        return self._gateway.prices.get(pool, FREE) != FREE


def _kv_share(replicas: Iterable[Replica], now: float) -> float | None:
    """Share in use at the replicas that are there and say how much they have."""
    there = (one for one in replicas if one.seen(now).state_at(now) is not ReplicaState.OUT)
    measured = [one.report.measured for one in there if one.report is not None]
    capacity = sum(one.limits.kv_capacity_tokens for one in measured)
    return sum(one.load.kv_active_tokens for one in measured) / capacity if capacity else None


def _kind(replica: Replica) -> str:
    if replica.relays:
        return "penstock"
    found = getattr(replica.upstream, "dialect", None)  # found out, if it was not given
    return found.name if found is not None else replica.dialect
