"""The runner: observe, decide, record, act, for every rollout that is on, once a second.

It has blocks, shares and orders from the store, and ready replicas from whoever runs it: the fleet's controller, or a
gateway where there is none. What it decides is one transaction: the rollout's state and story, what gateways are to
measure, and the route's shares. So a runner that dies at any moment leaves nothing half done, and its successor reads
the rows and goes on; the evidence is folded anew from the blocks, some pages in each round, and nothing is decided
before all are read. Of two runners that should both act, the second writes nothing: its revision is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from penstock.core.errors import Conflict, LeaseLost, ModelNotFound, RolloutNotFound, StoreUnavailable
from penstock.observe.background import count_error
from penstock.rollout.policy.decide import decide
from penstock.rollout.policy.evidence import Evidence
from penstock.rollout.policy.gates import evidence_for
from penstock.rollout.policy.state import (
    Decision,
    GateResult,
    OperatorAction,
    OperatorOrder,
    Phase,
    PoolSeen,
    RolloutState,
    Seen,
    Targets,
    order_for_gateways,
    targets,
)
from penstock.tenancy.database import Execute
from penstock.tenancy.rollouts import MAX_BLOCKS, Rollout
from penstock.tenancy.routes import RouteInForce, SharesAsked
from penstock.tenancy.store import Store

log = logging.getLogger(__name__)

_SAME_WEIGHT = 1e-9
READ_S = 1.0  # of a round, in which pages of blocks are read: a runner that takes over has many
_rollout_state_decoder = msgspec.json.Decoder(RolloutState)
_gates_decoder = msgspec.json.Decoder(list[GateResult])


class Capacity(NamedTuple):
    old: PoolSeen
    new: PoolSeen
    prices: Mapping[str, float] = MappingProxyType({})  # of a device-hour, by version; empty: nobody knows


class Live(NamedTuple):
    """A rollout that is on, as of the last round."""

    rollout: Rollout
    state: RolloutState
    gates: list[GateResult]
    targets: Targets


class RolloutRunner:
    """Blocks: for threads."""

    def __init__(
        self,
        store: Store,
        fenced: Callable[[], AbstractContextManager[Execute]],
        capacity: Callable[[Rollout], Capacity | None],
        clock: Callable[[], float],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fenced`: a transaction of the lease's holder. `capacity`: of a rollout's versions; None: the rollout is for
        another runner. `timer`: a clock that never runs backwards."""
        self._store = store
        self._book = store.rollouts
        self._fenced = fenced
        self._capacity = capacity
        self._clock = clock
        self._timer = timer
        self._read_until = 0.0  # by the timer, in this round
        # With the number of the last block that is in it. It stays when the lease is lost: blocks are numbered in the
        # order of their commits and never change, nor does the plan, whoever runs the rollout meanwhile.
        self._evidence: dict[str, tuple[int, Evidence]] = {}
        self._unreadable: set[str] = set()
        self._failing: set[str] = set()  # rollouts whose last look ended in an error that nobody expected

    def live(self) -> list[Live]:
        """The rollouts that are on and this runner's, as their last runner left them."""
        return [
            Live(rollout, state, [], targets(state))
            for rollout in self._book.on()
            if self._capacity(rollout) is not None and (state := self._state(rollout)) is not None
        ]

    def step(self, rollouts: Sequence[Rollout] | None = None) -> list[Live]:
        """One round; returns its rollouts that are on. `rollouts`: as they were just read; None: all that are on.
        Raises LeaseLost or StoreUnavailable."""
        found = []
        self._read_until = self._timer() + READ_S
        rollouts = self._book.on() if rollouts is None else rollouts
        for rollout in rollouts:
            if (live := self._guarded_look(rollout)) is not None:
                found.append(live)
        on = {one.id for one in rollouts}
        self._evidence = {id: one for id, one in self._evidence.items() if id in on}
        self._failing &= on
        return found

    def _guarded_look(self, rollout: Rollout) -> Live | None:
        """A rollout that cannot be decided stays as it is, with the capacity that it has: others go on."""
        try:
            live = self._look(rollout)
            self._failing.discard(rollout.id)
            return live
        except (LeaseLost, StoreUnavailable):
            raise
        except Exception as error:
            count_error("rollout runner", error)
            if rollout.id not in self._failing:
                self._failing.add(rollout.id)
                log.exception("rollout %s of %s cannot be decided, and stays as it is", rollout.id, rollout.model)
            state = self._state(rollout)
            return None if state is None else Live(rollout, state, [], targets(state))

    def _look(self, rollout: Rollout) -> Live | None:
        if (capacity := self._capacity(rollout)) is None:
            return None
        state = self._state(rollout)
        if state is None:
            return None
        try:
            route = self._store.routes.show(rollout.model)
        except ModelNotFound as error:
            count_error("rollout runner", error)
            return None
        if (read := self._read(rollout, state)) is None:
            return Live(rollout, state, [], targets(state))
        evidence, has_news = read
        seen = _seen(rollout, state, route, capacity)
        priced = replace(state, prices=dict(capacity.prices)) if capacity.prices else state
        decision = decide(priced, evidence, seen, self._clock())
        try:
            return self._record(rollout, state, route, seen, decision, has_news=has_news)
        except (Conflict, RolloutNotFound) as error:
            if error.reason == "changed" or isinstance(error, RolloutNotFound):
                log.debug("rollout %s is looked at again: %s", rollout.id, error.message)
                return Live(rollout, state, [], targets(state))
            raise

    def _state(self, rollout: Rollout) -> RolloutState | None:
        """None: another version of penstock wrote it, and is to go on with it."""
        try:
            return state_of(rollout)
        except (ValueError, TypeError) as error:
            if rollout.id not in self._unreadable:
                self._unreadable.add(rollout.id)
                log.error("rollout %s of %s cannot be read, and stays as it is: %s", rollout.id, rollout.model, error)
            count_error("rollout runner", error)
            return None

    def _read(self, rollout: Rollout, state: RolloutState) -> tuple[Evidence, bool] | None:
        """All evidence there is, and whether some of it is new. None: the next round reads on."""
        last, evidence = self._evidence.get(rollout.id) or (0, evidence_for(state))
        now, newest, has_news, has_more = self._clock(), last, False, True
        while has_more:  # a page at a time: a rollout of days has as many blocks as memory has room for
            before = newest
            newest, blocks = self._book.blocks(rollout.id, before)
            has_more, has_news = newest - before >= MAX_BLOCKS, has_news or bool(blocks)
            self._evidence.pop(rollout.id, None)  # what is added by half is read anew
            for block in blocks:
                evidence.add(block, now)
            self._evidence[rollout.id] = newest, evidence
            if has_more:
                with self._fenced():
                    pass  # pages may take longer than the lease lasts
                if self._timer() >= self._read_until:
                    return None
        evidence.close(now)
        return evidence, has_news

    def _record(
        self,
        rollout: Rollout,
        before: RolloutState,
        route: RouteInForce,
        seen: Seen,
        decision: Decision,
        *,
        has_news: bool,
    ) -> Live:
        state = decision.state
        aim = targets(state)
        gates = msgspec.json.encode(decision.gates) if decision.gates else bytes(rollout.gates)
        after = replace(
            rollout,
            state=Raw(msgspec.json.encode(state)),
            gates=Raw(gates),
            order=order_for_gateways(state),
            phase=str(state.phase),
            is_ordered=_is_ordered(rollout, before, decision),
            is_over=state.is_over,
            command=None if state.last_order >= rollout.num_commands else rollout.command,
        )
        if seen.changed_by is not None:  # it has been decided what becomes of another hand's shares
            after = replace(after, route_revision=route.last.revision)
        is_abort = state.phase is Phase.ABORTING and before.phase is not Phase.ABORTING
        shares = None if is_abort else _to_change(route, aim)
        has_changed = state != before or after.order != rollout.order or after.command != rollout.command
        if not (has_changed or is_abort or shares is not None or decision.entry is not None or has_news):
            return Live(rollout, state, decision.gates, aim)
        with self._fenced() as execute:
            written = self._book.change_within(
                execute,
                after,
                [decision.entry] if decision.entry is not None else [],
                shares=shares,
                action=f"rollout: {_action(state)}",
                rolls_back=is_abort,
            )
        if decision.entry is not None:
            entry = decision.entry
            log.info("rollout %s of %s: %s: %s", rollout.id, rollout.model, entry.what, entry.reason)
        return Live(written, state, decision.gates, aim)


def state_of(rollout: Rollout) -> RolloutState:
    """Raises ValueError or TypeError for one that another version of penstock wrote."""
    return _rollout_state_decoder.decode(rollout.state)


def gates_of(rollout: Rollout) -> list[GateResult]:
    return _gates_decoder.decode(rollout.gates)


def _seen(rollout: Rollout, state: RolloutState, route: RouteInForce, capacity: Capacity) -> Seen:
    command = rollout.command
    order = None
    if command is not None:
        action = OperatorAction(command.verb)
        order = OperatorOrder(command.number, action, command.by, command.at, command.is_full, command.reason)
    is_changed = route.last.revision != rollout.route_revision
    return Seen(
        old=capacity.old,
        new=capacity.new,
        weights=dict(route.weights),
        shadow=dict(route.shadow),
        changed_by=(route.last.by or "somebody") if is_changed else None,
        order=order,
        has_old=state.old in route.declared.weights,
        has_new=state.new in route.declared.weights,
    )


def _to_change(route: RouteInForce, aim: Targets) -> SharesAsked | None:
    """Returns the shares that the route lacks; None: none. A version that the file has no longer is left out."""
    asked = SharesAsked()
    for wanted, found, part in ((aim.weights, route.weights, asked.weights), (aim.shadow, route.shadow, asked.shadow)):
        if wanted is not None and _differ(wanted, found):
            part |= {version: share for version, share in wanted.items() if version in route.declared.weights}
    return asked if (any(asked.weights.values()) or asked.shadow) else None


def _differ(wanted: Mapping[str, float], found: Mapping[str, float]) -> bool:
    return any(abs(share - wanted.get(version, share)) > _SAME_WEIGHT for version, share in found.items())


def _is_ordered(rollout: Rollout, before: RolloutState, decision: Decision) -> bool:
    if decision.entry is None or before.phase is Phase.ABORTING:  # the end of an abort is as its beginning
        return rollout.is_ordered
    return bool(decision.entry.by)


def _action(state: RolloutState) -> str:
    if state.step_in_force is None or state.phase is Phase.ABORTING:
        return "as before"
    return state.plan.steps[state.step_in_force].title
