"""The next state of a rollout, from its state, the evidence and what is seen: `decide`.

    waiting    the new version's pool is not ready for the step; its shares are not in force yet
    watching   its shares are in force, its gates are looked at
    paused     shares stay; a gate that finds the new version worse aborts all the same, unless somebody set the shares
    holding    all clients are at the new version; the old one's replicas are kept until `hold_until`. The last step's
               gates go on being looked at: one that finds the new version worse takes the way back
    aborting   the shares from before are ordered, until they are seen in force

No client is served by the new version before the shadow steps of the plan are passed, whatever is ordered, except that
an admin promotes all at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.core.errors import Conflict
from penstock.rollout.policy.evidence import Evidence
from penstock.rollout.policy.gates import judge, with_tenants
from penstock.rollout.policy.plan import RolloutPlan, Undecided
from penstock.rollout.policy.sentences import sentence
from penstock.rollout.policy.state import (
    Decision,
    GateResult,
    OperatorAction,
    OperatorOrder,
    Phase,
    RolloutState,
    Seen,
    StoryEntry,
    Verdict,
    shares_of,
)

_SAME_SHARE = 1e-6  # of all weights together
_PATIENCE = 4  # times its limit, for a step that lacks requests
_ENOUGH_CAPACITY = 0.95  # of what a step needs: replicas come in whole numbers


def start(
    id: str,
    *,
    model: str,
    old: str,
    new: str,
    plan: RolloutPlan,
    now: float,
    weights: dict[str, float],
    shadow: dict[str, float],
    by: str = "",
    staying: tuple[str, ...] = (),
    prices: dict[str, float] | None = None,
) -> Decision:
    """A rollout at its beginning. Raises Conflict where there is nothing to do."""
    if old == new:
        raise Conflict(f"'{new}' has the clients already")
    for version in (old, new):
        if version not in weights:
            raise Conflict(f"'{model}' has no version '{version}': there are {', '.join(sorted(weights))}")
    if not plan.steps:
        raise Conflict("the plan has no steps")
    state = RolloutState(
        id,
        model,
        old,
        new,
        plan,
        now,
        by,
        dict(weights),
        dict(shadow),
        staying,
        dict(prices or {}),
        since=now,
    )
    reason = f"{by or 'somebody'} rolls {model} out from {old} to {new}, in {len(plan.steps)} steps"
    return _changed(state, now, "started", reason, by=by)


def decide(state: RolloutState, evidence: Evidence, seen: Seen, now: float, *, with_intervals: bool = True) -> Decision:
    """One look. At most one thing happens in it; the shell looks again within a second. Gates that nobody looks at may
    do without the intervals of shares, as long as nothing happens."""
    if state.is_over:
        return Decision(state)
    state = _with_clock(state, now)
    if state.phase is Phase.ABORTING:
        return _aborting(state, seen, now)
    if seen.order is not None and seen.order.id > state.last_order:
        state = replace(state, last_order=seen.order.id)
        if (decision := _obey(state, seen.order, now)) is not None:
            return decision
    state = _with_presence(state, seen, now)
    if state.gone_since is not None:
        took = now - state.gone_since
        if took >= state.plan.unready_s:
            reason = f"{state.new} has been no version of {state.model} for {took:,.0f} s: back to {state.old}"
            return _abort(state, now, reason)
    can_be_over = state.phase is Phase.HOLDING and (seen.has_new or seen.changed_by is not None)
    if can_be_over and (decision := _taken_over(state, seen, now)) is not None:
        return decision
    if seen.changed_by is not None and not state.hands_off:
        paused = replace(_paused(state, now), hands_off=True)
        reason = f"{seen.changed_by} changed the shares: they are left as they are until somebody resumes"
        return _changed(paused, now, "paused", reason)
    if not seen.has_new:
        return Decision(state)
    if not seen.has_old:
        if state.phase is Phase.PAUSED:
            return Decision(state)
        paused = replace(_paused(state, now), hands_off=True)
        return _changed(paused, now, "paused", f"{state.old} is no longer a version of {state.model}")
    state = with_tenants(state, evidence)
    state = _with_readiness(state, seen, now)
    gates = judge(state, evidence, with_intervals=with_intervals)
    if state.hands_off:  # whoever set the shares has the say
        return Decision(state, gates=gates)
    if any(gate.verdict is Verdict.WORSE for gate in gates):
        gates = judge(state, evidence)
        worse = [gate for gate in gates if gate.verdict is Verdict.WORSE]
        return _abort(state, now, _gates_reason(state, worse, f"back to {state.old}"), gates=gates)
    if _is_unready_for_long(state, now):
        return _abort(state, now, _unready_reason(state, now), gates=gates)
    if state.phase is Phase.WATCHING:
        return _watching(state, evidence, gates, now)
    if state.phase is Phase.HOLDING:
        return _holding(state, seen, gates, now)
    decision = _waiting(state, seen, now) if state.phase is Phase.WAITING else Decision(state)
    return replace(decision, gates=decision.gates or gates)


def _with_clock(state: RolloutState, now: float) -> RolloutState:
    """No moment that has passed is ahead, and none that is waited for is farther than it can be: wall clocks are set
    back."""
    unready_since, unknown_since, gone_since = (
        None if at is None else min(at, now) for at in (state.unready_since, state.unknown_since, state.gone_since)
    )
    return replace(
        state,
        since=min(state.since, now),
        settle_until=min(state.settle_until, now + state.plan.settle_s),
        hold_until=min(state.hold_until, now + state.plan.hold_s),
        unready_since=unready_since,
        unknown_since=unknown_since,
        gone_since=gone_since,
    )


def _with_presence(state: RolloutState, seen: Seen, now: float) -> RolloutState:
    """Takes down since when the new version is not declared: a gateway with an older file takes it out for a moment."""
    if seen.has_new is (state.gone_since is None):
        return state
    return replace(state, gone_since=None if seen.has_new else now)


def _with_readiness(state: RolloutState, seen: Seen, now: float) -> RolloutState:
    """Takes down since when clients are sent to a new version without a ready replica. A time in which nobody knows the
    replicas neither counts nor begins it anew; one in which the old version has none either is no such time: nothing
    would be won by going back."""
    has_clients = state.step_in_force is not None and bool(state.watched_step.share) and not state.hands_off
    since, unknown_since = state.unready_since, state.unknown_since
    if has_clients and seen.new.ready is None:
        return state if since is None or unknown_since is not None else replace(state, unknown_since=now)
    is_unready = has_clients and seen.new.ready == 0 and (seen.old.ready != 0 or _is_parked(state, seen))
    if not is_unready:
        since = None
    elif since is None:
        since = now
    elif unknown_since is not None:
        since += now - unknown_since
    return replace(state, unready_since=since, unknown_since=None)


def _is_parked(state: RolloutState, seen: Seen) -> bool:
    """Whether the old version's replicas may be asleep, and a fleet that sizes their pool wakes them to go back."""
    is_sized = seen.old.can_take is not None
    return state.phase is Phase.HOLDING and state.plan.on_promote == "park" and is_sized


def _is_unready_for_long(state: RolloutState, now: float) -> bool:
    if state.unready_since is None or state.unknown_since is not None:
        return False
    return now - state.unready_since >= state.plan.unready_s


def _unready_reason(state: RolloutState, now: float) -> str:
    took = now - (state.unready_since or now)
    return f"{state.new} has had no ready replica for {took:,.0f} s, and clients are sent to it: back to {state.old}"


def _watching(state: RolloutState, evidence: Evidence, gates: list[GateResult], now: float) -> Decision:
    step = state.current_step
    took = now - state.since
    if took < step.min_s or state.unready_since is not None:
        return Decision(state, gates=gates)
    if (count := evidence.new_requests(state.step)) < step.min_requests:
        if took < _PATIENCE * step.max_s:
            return Decision(state, gates=gates)
        reason = (
            f"{_step_title(state)}: {count:,} of the {step.min_requests:,} requests needed in {took:,.0f} s: paused"
        )
        return _changed(_paused(state, now), now, "paused", reason, gates=gates)
    waits = any(state.plan.gates[gate.gate].waits or _leans(gate) for gate in gates if _is_open(gate))
    if waits and took < step.max_s:
        return Decision(state, gates=gates)
    gates = judge(state, evidence)
    undecided = [gate for gate in gates if _is_open(gate)]
    if undecided:
        return _at_end(state, now, gates, undecided)
    return _next_step(state, now, _gates_reason(state, gates, "no gate finds it worse"), gates)


def _is_open(gate: GateResult) -> bool:
    """Whether more is to be known of it. Tenants' gates can only stop a rollout: most have too few requests."""
    return gate.verdict is Verdict.UNDECIDED and not gate.tenant


def _leans(gate: GateResult) -> bool:
    """Whether it would be worse if the numbers were exact."""
    if gate.estimate is None:
        return False
    return gate.estimate > (1.0 + gate.margin if gate.is_ratio else gate.margin)


def _at_end(state: RolloutState, now: float, gates: Sequence[GateResult], undecided: Sequence[GateResult]) -> Decision:
    step = state.current_step

    def doing(what: Undecided) -> list[GateResult]:
        return [one for one in undecided if (step.undecided or state.plan.gates[one.gate].undecided) == what]

    if those := doing("abort"):
        return _abort(
            state, now, _gates_reason(state, those, f"undecided at the step's end; back to {state.old}"), gates
        )
    if those := doing("pause"):
        reason = _gates_reason(state, those, "undecided at the step's end; paused")
        return _changed(_paused(state, now), now, "paused", reason, gates=gates)
    return _next_step(state, now, _gates_reason(state, undecided, "undecided at the step's end; on it goes"), gates)


def _next_step(state: RolloutState, now: float, reason: str, gates: Sequence[GateResult], by: str = "") -> Decision:
    following = state.step + 1
    steps = state.plan.steps
    if following == len(steps):
        if state.step_in_force != state.step:  # an order passes it before its shares are in force
            state = _settling(replace(state, step_in_force=state.step, tenants=()), now)
        held = replace(state, phase=Phase.HOLDING, since=now, hold_until=now + state.plan.hold_s)
        if state.plan.on_promote == "release":
            held = replace(held, hold_until=now)
        return _changed(held, now, "holding", reason, gates=gates, by=by)
    ahead = replace(
        state,
        phase=Phase.WAITING,
        step=following,
        since=now,
        tenants=(),
    )
    return _changed(ahead, now, "step", reason, gates=gates, by=by)


def _waiting(state: RolloutState, seen: Seen, now: float) -> Decision:
    step = state.current_step
    if state.step_in_force == state.step:  # ordered: in force as soon as they are seen
        weights, shadow = shares_of(state, step)
        if not (_is_same(weights, seen.weights) and _is_same_shadow(shadow, seen.shadow)):
            return Decision(state)
        watching = _settling(replace(state, phase=Phase.WATCHING, since=now), now)
        return _changed(watching, now, "watching", f"{_step_title(state)} is in force")
    needed = step.share or step.shadow or 0.0
    is_ready = bool(seen.new.ready) and (seen.new.can_take is None or seen.new.can_take >= _ENOUGH_CAPACITY * needed)
    if is_ready:
        ordered = replace(state, step_in_force=state.step, tenants=())
        return Decision(_settling(ordered, now))
    if now - state.since >= state.plan.capacity_wait_s:
        reason = (
            f"{_step_title(state)}: {state.new} was not ready within {state.plan.capacity_wait_s:,.0f} s: "
            + ("nobody knows its replicas" if seen.new.ready is None else f"{seen.new.ready} replicas")
            + ("" if seen.new.can_take is None else f" that can take {100 * seen.new.can_take:.3g} % of the requests")
        )
        return _changed(_paused(state, now), now, "paused", reason)
    return Decision(state)


def _taken_over(state: RolloutState, seen: Seen, now: float) -> Decision | None:
    """The end of a hold from which there is no way back any more; None: there is one."""
    if seen.changed_by is None and seen.has_old:
        return None
    done = replace(state, phase=Phase.PROMOTED, since=now)
    why = f"{seen.changed_by} changed the shares" if seen.changed_by else f"{state.old} is no longer a version"
    return _changed(done, now, "promoted", f"{why}: {state.old} is no longer held")


def _holding(state: RolloutState, seen: Seen, gates: list[GateResult], now: float) -> Decision:
    """No gate finds it worse."""
    weights, shadow = shares_of(state, state.plan.steps[-1])
    is_in_force = _is_same(weights, seen.weights) and _is_same_shadow(shadow, seen.shadow)
    if now < state.hold_until or not is_in_force or state.unready_since is not None:
        return Decision(state, gates=gates)
    done = replace(state, phase=Phase.PROMOTED, since=now)
    return _changed(done, now, "promoted", f"{state.model} is {state.new}; {state.old} is no longer held", gates=gates)


def _aborting(state: RolloutState, seen: Seen, now: float) -> Decision:
    """Done as soon as the shares from before are seen, as far as there are still versions to have them."""
    weights, shadow = (
        {version: share for version, share in before.items() if version in seen.weights}
        for before in (state.weights_before, state.shadow_before)
    )
    is_back = _is_same(weights, seen.weights) and _is_same_shadow(shadow, seen.shadow)
    if is_back:
        said = "all shares are as before"
    elif not any(weights.values()):
        said = f"{state.old} is no longer a version of {state.model}: there is nothing to go back to"
    elif seen.changed_by is not None:
        said = f"{seen.changed_by} changed the shares"
    else:
        return Decision(state)
    done = replace(state, phase=Phase.ABORTED, since=now)
    entry = StoryEntry(now, "aborted", said, done.phase, done.step)
    return Decision(done, entry)  # the state's reason is still why


def _obey(state: RolloutState, order: OperatorOrder, now: float) -> Decision | None:
    """None: the order means nothing in this phase."""
    said = f"{order.by or 'somebody'} ordered it" + (f": {order.reason}" if order.reason else "")
    if order.action is OperatorAction.ABORT:
        return _abort(state, now, f"back to {state.old}: {said}", by=order.by)
    if state.phase is Phase.HOLDING:
        return None
    if order.action is OperatorAction.PAUSE:
        if state.phase is Phase.PAUSED:
            return None
        return _changed(_paused(state, now), now, "paused", f"paused: {said}", by=order.by)
    if order.action is OperatorAction.RESUME:
        return _resume(state, now, said, order.by) if state.phase is Phase.PAUSED else None
    last = len(state.plan.steps) - 1
    state = replace(state, hands_off=False)
    if order.is_full and state.step < last:
        ahead = replace(state, phase=Phase.WAITING, step=last, since=now, tenants=())
        return _changed(ahead, now, "step", f"all clients to {state.new}: {said}", by=order.by)
    return _next_step(state, now, f"{_step_title(state)} is passed: {said}", [], by=order.by)


def _resume(state: RolloutState, now: float, said: str, by: str) -> Decision:
    """The step begins again. Shares that somebody else set are ordered anew; what was measured still holds, whatever
    the shares were."""
    resumed = replace(state, phase=Phase.WAITING, since=now, hands_off=False)
    if state.hands_off:
        resumed = _settling(resumed, now)
    return _changed(resumed, now, "resumed", f"{_step_title(state)} begins again: {said}", by=by)


def _settling(state: RolloutState, now: float) -> RolloutState:
    """With shares that change now: from their order on, and anew when they are seen in force."""
    return replace(state, settle_until=now + state.plan.settle_s)


def _paused(state: RolloutState, now: float) -> RolloutState:
    if state.phase is Phase.PAUSED:
        return state
    return replace(state, phase=Phase.PAUSED, since=now)


def _abort(state: RolloutState, now: float, reason: str, gates: Sequence[GateResult] = (), by: str = "") -> Decision:
    aborting = replace(state, phase=Phase.ABORTING, since=now, hands_off=False)
    return _changed(aborting, now, "aborting", reason, gates=gates, by=by)


def _changed(
    state: RolloutState, now: float, what: str, reason: str, *, gates: Sequence[GateResult] = (), by: str = ""
) -> Decision:
    state = replace(state, reason=reason)
    entry = StoryEntry(now, what, reason, state.phase, state.step, by, list(gates))
    return Decision(state, entry, list(gates))


def _gates_reason(state: RolloutState, gates: Sequence[GateResult], end: str) -> str:
    said = [sentence(gate, state.old) for gate in gates[:3]]
    if len(gates) > 3:
        said.append(f"{len(gates) - 3} more")
    return f"{_step_title(state)}: {'; '.join([*said, end])}"


def _step_title(state: RolloutState) -> str:
    if state.phase is Phase.HOLDING:
        return f"holding {state.old}"
    return f"step {state.step + 1}, {state.current_step.title}"


def _is_same(wanted: dict[str, float], found: dict[str, float]) -> bool:
    """Whether weights are the same shares."""
    all_wanted, all_found = sum(wanted.values()) or 1.0, sum(found.values()) or 1.0
    return all(
        abs(wanted.get(name, 0.0) / all_wanted - found.get(name, 0.0) / all_found) <= _SAME_SHARE
        for name in wanted.keys() | found.keys()
    )


def _is_same_shadow(wanted: dict[str, float], found: dict[str, float]) -> bool:
    return all(
        abs(wanted.get(name, 0.0) - found.get(name, 0.0)) <= _SAME_SHARE for name in wanted.keys() | found.keys()
    )
