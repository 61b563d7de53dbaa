"""How a gateway stands at this moment, as plain data: for /metrics and for the admin API. Read in the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from penstock.admission.admission import Admission
from penstock.admission.settings import CLASS_NAMES
from penstock.core.replica import UNBOUNDED, ReplicaState
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.tokens.request_size import Pool
from penstock.observe.redaction import redact
from penstock.router.routes import Route
from penstock.router.rules import DEFAULT
from penstock.tenancy.prices import Price

STARTING = "starting"  # out, since its model is being loaded
PARKED = "parked"  # draining, and its device's memory is given back
STANDBY = "standby"  # loaded and warm, and a controller keeps it without traffic


class ReplicaView(Struct, frozen=True):
    id: str
    model: str
    kind: str  # penstock, or the dialect that it speaks
    state: str  # a `ReplicaState`, STARTING, or what a controller keeps it in: `tenancy.replicas.RESTING`
    breaker: str
    share: float  # below one while it starts slowly, and while it is slow or wrong
    in_flight: int  # requests of this gateway
    streams: int  # those of them that are streams
    running: int  # of everybody's, as it last said
    waiting: int
    prefill_tokens: int
    kv_active_tokens: int
    kv_capacity_tokens: int | None
    max_context_tokens: int | None
    heard_s_ago: float | None
    source: str  # that names it: file, store, dns
    is_draining: bool  # an operator said so; a replica may drain by itself too
    is_kv_exact: bool  # prompts are compared with every KV block of it, by its events, and not with what it was sent
    role: str = "both"  # prefill: it computes prompts for others; decode: it answers, and computes none for others


class QueueView(Struct, frozen=True):
    model: str
    waiting: dict[str, int]  # by class
    held: int = 0  # of them, for want of any replica
    eta_s: float | None = None  # until there is one, as the fleet's controller says; None: there is, or nobody says


class VersionView(Struct, frozen=True, omit_defaults=True):
    """A version without a pool of its own, or with an adapter on it."""

    model: str = ""  # on whose replicas it is
    adapter: str = ""
    pipeline: str = ""


class RouteView(Struct, frozen=True):
    name: str
    aliases: tuple[str, ...]
    pools: dict[str, float]  # and their weights
    versions: dict[str, str]  # and the names that metrics, logs and usage have for them
    weights: dict[str, float]  # of versions
    shadow: dict[str, float]  # versions that are sent copies, by these names, and of how much
    made_of: dict[str, VersionView]  # versions that are no pools of their own
    fallbacks: tuple[str, ...]
    rules: list[str]  # in their order, and where they lead
    price: Price | None
    prices: dict[str, Price]  # of the pools of versions
    revision: int  # of the weights; 0: as the file has them


class GatewayState(Struct, frozen=True):
    replicas: list[ReplicaView]
    queues: list[QueueView]


def state_of(replicas: Iterable[Replica], pools: Mapping[str, Pool], admission: Admission, now: float) -> GatewayState:
    """`pools`: their models' tokenizers, without which no prompt can be compared with the blocks of a replica."""
    index = admission.router.index

    def is_kv_exact(replica: Replica) -> bool:
        return index.is_exact(replica.id) and pools[replica.model].tokens.prompt_tokenizer is not None

    views = [_replica(replica, is_kv_exact(replica), now) for replica in replicas]
    models = sorted({view.model for view in views} | admission.waiting_models)
    return GatewayState(views, [_queue(admission, model, now) for model in models])


def route_shown(route: Route, prices: Mapping[str, Price]) -> RouteView:
    rules = route.rules
    leads = [] if rules is None else [(rule.name, rule.to) for rule in rules.rules] + [(DEFAULT, rules.default)]
    return RouteView(
        name=route.name,
        aliases=route.aliases,
        pools=_weights(route),
        versions={one.name: route.key(one) for one in route.versions},
        weights={one.name: one.weight for one in route.versions},
        shadow={route.key(one): one.shadow for one in route.versions if one.shadow},
        made_of={
            one.name: VersionView(one.of, one.adapter, one.pipeline)
            for one in route.versions
            if one.of or one.adapter or one.pipeline
        },
        fallbacks=tuple(fallback.route for fallback in route.fallbacks),
        rules=[f"{name}->{to}" for name, to in leads],
        price=prices.get(route.name),
        prices={share.pool: prices[share.pool] for share in route.pools if route.versions and share.pool in prices},
        revision=route.revision,
    )


def _weights(route: Route) -> dict[str, float]:
    """Weights by pool, which several versions may share."""
    found: dict[str, float] = {}
    for share in route.pools:
        found[share.pool] = found.get(share.pool, 0.0) + share.weight
    return found


def _queue(admission: Admission, model: str, now: float) -> QueueView:
    waiting = {name: admission.num_waiting(model, priority) for name, priority in CLASS_NAMES.items()}
    if admission.has_active(model, now):
        return QueueView(model, waiting)
    eta_s = admission.eta_s(model, now)
    return QueueView(model, waiting, sum(waiting.values()), None if eta_s is None else round(eta_s, 1))


def _replica(replica: Replica, is_kv_exact: bool, now: float) -> ReplicaView:
    seen = replica.seen(now)
    state = seen.state_at(now)
    return ReplicaView(
        id=redact(replica.id),
        model=replica.model,
        kind=replica.kind,
        state=_shown(replica, state, now),
        breaker=str(replica.breaker.state(now)),
        share=seen.share,
        in_flight=len(replica.in_flight),
        streams=sum(request.is_stream for request in replica.in_flight),
        running=seen.load.num_running,
        waiting=seen.load.num_queued,
        prefill_tokens=seen.load.queued_tokens,
        kv_active_tokens=seen.load.kv_active_tokens,
        kv_capacity_tokens=_bounded(seen.limits.kv_capacity_tokens),
        max_context_tokens=_bounded(seen.limits.max_model_len),
        heard_s_ago=round(now - seen.taken_at, 3) if seen.reports and seen.taken_at else None,
        source=replica.source,
        is_draining=replica.is_draining,
        is_kv_exact=is_kv_exact,
        role=seen.role,
    )


def _shown(replica: Replica, state: ReplicaState, now: float) -> str:
    """One that is to stand by and is out is out."""
    if state is ReplicaState.OUT and (replica.is_starting(now) or replica.fleet_state == STANDBY):
        return STARTING if replica.is_starting(now) else str(state)
    if replica.is_resting:
        return replica.fleet_state or PARKED
    return str(state)


def _bounded(tokens: int) -> int | None:
    return None if tokens >= UNBOUNDED else tokens
