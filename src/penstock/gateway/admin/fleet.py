"""The fleet in the admin API, as its controller left it in the store: pools, replicas, decisions, history and cost."""

from __future__ import annotations

import time

import msgspec

from penstock.core.errors import InvalidValue, NotFound
from penstock.gateway.admin.resources import Action, AdminCall, Answer, Shape
from penstock.tenancy.fleet_cost import cost_since
from penstock.tenancy.store import Store
from penstock.tenancy.times import moment

MAX_DECISIONS = 1000
_DECISIONS = 100
_HOUR_S, _DAY_S = 3600.0, 86400.0


def _status(store: Store, call: AdminCall) -> Answer:
    call.query()
    book = store.fleet
    pools = [msgspec.structs.asdict(one) for one in book.pools()]
    replicas = [msgspec.structs.asdict(one) for one in book.replicas()]
    return Answer(200, {"at": time.time(), "pools": pools, "replicas": replicas})


def _decisions(store: Store, call: AdminCall) -> Answer:
    query = call.query("pool", "since", "limit")
    limit = query.get("limit", str(_DECISIONS))
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_DECISIONS:
        raise InvalidValue(f"it is a number from 1 to {MAX_DECISIONS}", param="limit")
    since = moment(query["since"]) if "since" in query else 0.0
    found = store.fleet.decisions(query.get("pool"), since=since, limit=int(limit))
    return Answer(200, {"decisions": [one.document for one in found]})


def _history(store: Store, call: AdminCall) -> Answer:
    query = call.query("pool", "since")
    since = moment(query["since"]) if "since" in query else time.time() - _HOUR_S
    return Answer(200, {"samples": store.fleet.history(query.get("pool"), since=since)})


def _cost(store: Store, call: AdminCall) -> Answer:
    query = call.query("since")
    found = cost_since(store, moment(query["since"]) if "since" in query else time.time() - _DAY_S)
    return Answer(200, {"since": found.since, "pools": found.document("pool"), "tenants": found.document("tenant")})


_PARTS: dict[str, Action] = {
    "decisions": _decisions,
    "history": _history,
    "cost": _cost,
}


def _part(store: Store, call: AdminCall) -> Answer:
    if (answer := _PARTS.get(call.name)) is None:
        raise NotFound(f"a fleet has {', '.join(_PARTS)}, and no '{call.name}'")
    return answer(store, call)


FLEET_RESOURCES: dict[Shape, dict[str, Action]] = {
    ("fleet",): {"GET": _status},
    ("fleet", None): {"GET": _part},
}
