"""Rollouts in the admin API: started, seen and ordered; the same as `penstock rollout`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from penstock.core.errors import ConfigError, InvalidValue
from penstock.gateway.admin.resources import Action, AdminCall, Answer, Shape
from penstock.rollout.desk import find, find_on, rollout_document, start_rollout, story_of
from penstock.tenancy.rollouts import RolloutVerb
from penstock.tenancy.store import Store

MAX_SHOWN = 100


class RolloutAsked(Struct, forbid_unknown_fields=True):
    model: str
    to: str  # versions
    from_: str | None = field(name="from", default=None)  # none: the one that has most of the traffic
    plan: dict[str, Any] = field(default_factory=dict)  # what differs from the default one


_rollout_asked_decoder = msgspec.json.Decoder(RolloutAsked)


class OrderAsked(Struct, forbid_unknown_fields=True):
    reason: str = ""
    all: bool = False  # with promote: all clients at once


_order_asked_decoder = msgspec.json.Decoder(OrderAsked)


def _start(store: Store, call: AdminCall) -> Answer:
    asked = call.body(_rollout_asked_decoder)
    try:
        rollout = start_rollout(store, asked.model, asked.to, old=asked.from_, plan=asked.plan, by=call.admin)
    except ConfigError as error:
        raise InvalidValue(error.message, param=f"plan.{error.param}" if error.param else "plan") from None
    return Answer(201, rollout_document(rollout))


def _list(store: Store, call: AdminCall) -> Answer:
    """The newest first."""
    found = store.rollouts.all(call.query("model").get("model"))
    return Answer(200, {"rollouts": [rollout_document(one) for one in found[:MAX_SHOWN]]})


def _show(store: Store, call: AdminCall) -> Answer:
    return Answer(200, rollout_document(find(store.rollouts, call.name)))


def _story(store: Store, call: AdminCall) -> Answer:
    found = find(store.rollouts, call.name)
    return Answer(200, {"id": found.id, "story": story_of(store.rollouts, found.id)})


def _giving(verb: RolloutVerb) -> Action:
    def give(store: Store, call: AdminCall) -> Answer:
        asked = call.body(_order_asked_decoder)
        if asked.all and verb is not RolloutVerb.PROMOTE:
            raise InvalidValue("`all` is for promote alone", param="all")
        found = find_on(store.rollouts, call.name)
        given = store.rollouts.give(found.id, verb, by=call.admin, is_full=asked.all, reason=asked.reason)
        return Answer(202, rollout_document(given))

    return give


ROLLOUT_RESOURCES: dict[Shape, dict[str, Action]] = {
    ("rollouts",): {"GET": _list, "POST": _start},
    ("rollouts", None): {"GET": _show},
    ("rollouts", None, "story"): {"GET": _story},
    **{("rollouts", None, str(verb)): {"POST": _giving(verb)} for verb in RolloutVerb},
}
