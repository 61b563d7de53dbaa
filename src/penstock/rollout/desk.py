"""Operators' side of rollouts, by command or by the admin API: start one, and see how it stands and why."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from penstock.core.config import build
from penstock.core.errors import ConfigError, Conflict, InvalidValue, RolloutNotFound
from penstock.core.slo import Slo
from penstock.rollout.policy.decide import start
from penstock.rollout.policy.plan import RolloutPlan, plan_from
from penstock.rollout.policy.state import StoryEntry
from penstock.rollout.runner import gates_of, state_of
from penstock.tenancy.rollouts import Rollout, RolloutBook, new_rollout
from penstock.tenancy.routes import RouteInForce
from penstock.tenancy.store import Store

Document = dict[str, Any]
_story_entry_decoder = msgspec.json.Decoder(StoryEntry)


def plan_of(route: RouteInForce, values: Mapping[str, Any]) -> RolloutPlan:
    """The plan for a model: what `values` say, over what follows from its objectives. Raises ConfigError."""
    plan = plan_from(values, build(Slo, route.declared.slo))
    if route.declared.has_copies or not any(step.is_shadow for step in plan.steps):
        return plan
    if "steps" in values:
        said = f"'{route.declared.name}' has versions that are pipelines: requests for them are not copied"
        raise ConfigError(f"{said}, so that no step can have `shadow`", param="steps")
    return dataclasses.replace(plan, steps=tuple(step for step in plan.steps if not step.is_shadow))


def start_rollout(
    store: Store,
    model: str,
    new: str,
    *,
    old: str | None = None,
    plan: Mapping[str, Any] | None = None,
    by: str = "",
    now: float | None = None,
) -> Rollout:
    """`old`: the version that has most of the traffic, unless it is said. Raises ConfigError for a plan that is none,
    and as `RolloutBook.start`."""
    route = store.routes.show(model)
    rollout = new_rollout(model, old or _old_of(route, new), new, by=by)
    store.rollouts.check(rollout)
    decision = start(
        rollout.id,
        model=model,
        old=rollout.old,
        new=new,
        plan=plan_of(route, plan or {}),
        now=time.time() if now is None else now,
        weights=dict(route.weights),
        shadow=dict(route.shadow),
        by=by,
    )
    state = decision.state
    begun = replace(rollout, state=Raw(msgspec.json.encode(state)), phase=str(state.phase))
    return store.rollouts.start(begun, [decision.entry] if decision.entry is not None else [])


def find(book: RolloutBook, name: str) -> Rollout:
    """Finds a rollout by id; or by model: the one that is on, else its last."""
    try:
        return book.get(name)
    except RolloutNotFound:
        if found := book.all(name):
            return next((one for one in found if not one.is_over), found[0])
        raise RolloutNotFound(f"there is no rollout '{name}', and none of a model of this name") from None


def find_on(book: RolloutBook, name: str) -> Rollout:
    """Finds a rollout as `find` does. Raises Conflict for one that is over."""
    found = find(book, name)
    if found.is_over:
        raise Conflict(f"rollout {found.id} of '{found.model}' is over: {found.phase}", reason="over")
    return found


def story_of(book: RolloutBook, id: str) -> list[StoryEntry]:
    """The oldest first. Entries that another version of penstock wrote and this one cannot read are left out."""
    found = []
    for one in book.story(id):
        try:
            found.append(_story_entry_decoder.decode(one.document))
        except (ValueError, TypeError):
            continue
    return found


def rollout_document(rollout: Rollout) -> Document:
    """How it stands, for programs."""
    common: Document = {
        "id": rollout.id,
        "model": rollout.model,
        "from": rollout.old,
        "to": rollout.new,
        "phase": rollout.phase,
        "is_over": rollout.is_over,
        "by": rollout.by,
        "started_at": rollout.started_at,
        "changed_at": rollout.changed_at,
        "ended_at": rollout.ended_at,
        "ordered": None if rollout.command is None else str(rollout.command.verb),
    }
    try:
        state, gates = state_of(rollout), gates_of(rollout)
    except (ValueError, TypeError):
        return common | {"reason": "another version of penstock wrote it, and goes on with it"}
    steps = [msgspec.to_builtins(step) | {"title": step.title} for step in state.plan.steps]
    return common | {
        "reason": state.reason,
        "step": state.step,
        "steps": steps,
        "since": state.since,
        "settle_until": state.settle_until or None,
        "hold_until": state.hold_until or None,
        "hands_off": state.hands_off,
        "gates": msgspec.to_builtins(gates),
        "plan": msgspec.to_builtins(state.plan),
    }


def _old_of(route: RouteInForce, new: str) -> str:
    others = {version: weight for version, weight in route.weights.items() if version != new}
    if not others:
        raise InvalidValue(f"'{route.declared.name}' has no version but '{new}'", param="from")
    return max(others, key=lambda version: others[version])
