"""Replicas in the admin API: added, drained and removed in the store, which every gateway follows."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from penstock.gateway.admin.resources import Action, AdminCall, Answer, Shape
from penstock.gateway.membership.store import check_options
from penstock.tenancy.store import Store


class ReplicaAsked(Struct, forbid_unknown_fields=True):
    model: str
    url: str
    options: dict[str, Any] = field(default_factory=dict)
    draining: bool = False  # drains one that a gateway's file or DNS names, until it is removed from the store


_replica_asked_decoder = msgspec.json.Decoder(ReplicaAsked)


class WhichReplica(Struct, forbid_unknown_fields=True):
    url: str
    model: str | None = None  # none: in every pool that has it


_which_replica_decoder = msgspec.json.Decoder(WhichReplica)


class DrainAsked(WhichReplica, forbid_unknown_fields=True):
    draining: bool = True


_drain_asked_decoder = msgspec.json.Decoder(DrainAsked)


def _add(store: Store, call: AdminCall) -> Answer:
    asked = call.body(_replica_asked_decoder)
    check_options(asked.options)
    row = store.replicas.add(asked.model, asked.url, asked.options, is_draining=asked.draining, by=call.admin)
    return Answer(201, row)


def _drain(store: Store, call: AdminCall) -> Answer:
    asked = call.body(_drain_asked_decoder)
    rows = store.replicas.drain(asked.url, asked.model, is_draining=asked.draining, by=call.admin)
    return Answer(200, {"replicas": rows})


def _remove(store: Store, call: AdminCall) -> Answer:
    asked = call.body(_which_replica_decoder)
    return Answer(200, {"replicas": store.replicas.remove(asked.url, asked.model)})


REPLICA_RESOURCES: dict[Shape, dict[str, Action]] = {
    ("replicas",): {"POST": _add, "PATCH": _drain, "DELETE": _remove},
}
