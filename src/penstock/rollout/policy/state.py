"""State of a rollout that is kept, what is observed beside its evidence, and what is to be in force.

RolloutState   kept in the store: phase, step and all that is needed to go back
StoryEntry     one decision with its numbers, in the words that people read
Seen           pools, shares and orders, as the runner finds them
Targets        shares and capacity that are to be in force, whole: to apply them twice does no harm
Decision       the next state, and the entry if something changed
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from penstock.core.rollout import RolloutOrder
from penstock.rollout.policy.plan import RolloutPlan, RolloutStep

WHOLE = 100.0


class Phase(StrEnum):
    WAITING = "waiting"  # for capacity of the new version
    WATCHING = "watching"
    PAUSED = "paused"
    HOLDING = "holding"  # all clients are at the new version, and the old one can be gone back to at once
    PROMOTED = "promoted"
    ABORTING = "aborting"  # until the shares from before are seen in force
    ABORTED = "aborted"

    @property
    def is_over(self) -> bool:
        return self in (Phase.PROMOTED, Phase.ABORTED)


class Verdict(StrEnum):
    BETTER = "better"
    EQUAL = "equal"
    WORSE = "worse"
    UNDECIDED = "undecided"


class OperatorAction(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    PROMOTE = "promote"  # the next step, or out of a pause; `skip` all that are left
    ABORT = "abort"


class OperatorOrder(Struct, frozen=True):
    """Order that an admin gave, once."""

    id: int  # grows: an order is obeyed once
    action: OperatorAction
    by: str = ""
    at: float = 0.0
    is_full: bool = False  # with promote: all clients at once
    reason: str = ""


class GateResult(Struct, frozen=True):
    """A gate's verdict and its numbers. `estimate`, `low` and `high`: of ratios new over old, else of differences;
    None: too few to say."""

    gate: str
    verdict: Verdict
    margin: float
    alpha: float
    tenant: str = ""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    old_count: int = 0
    new_count: int = 0
    old_value: float | None = None  # the mean or quantile, or the share
    new_value: float | None = None
    is_ratio: bool = True
    method: str = ""


class StoryEntry(Struct, frozen=True):
    at: float
    what: str  # in a word: started, step, paused, resumed, aborting, aborted, holding, promoted
    reason: str  # one plain sentence
    phase: Phase
    step: int
    by: str = ""  # an admin's name; empty: the policy's
    gates: list[GateResult] = field(default_factory=list)


class RolloutState(Struct, frozen=True):
    id: str
    model: str  # the route
    old: str  # versions
    new: str
    plan: RolloutPlan
    started_at: float
    started_by: str = ""
    weights_before: dict[str, float] = field(default_factory=dict)
    shadow_before: dict[str, float] = field(default_factory=dict)
    staying: tuple[str, ...] = ()  # tenants that opted out
    prices: dict[str, float] = field(default_factory=dict)  # of a device-hour, by version
    phase: Phase = Phase.WAITING
    step: int = 0  # the one that is waited for or watched
    step_in_force: int | None = None  # whose shares are to be in force; None: those from before
    since: float = 0.0  # when phase and step became what they are
    settle_until: float = 0.0
    hands_off: bool = False  # somebody else set the shares: they are left as they are
    hold_until: float = 0.0
    unready_since: float | None = None  # clients are sent to the new version, and it has no ready replica; None: it has
    unknown_since: float | None = None  # with `unready_since`: nobody has known its replicas from then on
    gone_since: float | None = None  # the new version is not declared; None: it is
    tenants: tuple[str, ...] = ()  # with gates of their own in this step
    last_order: int = 0
    reason: str = ""

    @property
    def current_step(self) -> RolloutStep:
        return self.plan.steps[self.step]

    @property
    def watched(self) -> int:
        """The step whose shares are in force: while the next one waits for capacity, the one before it."""
        return self.step if self.step_in_force is None else self.step_in_force

    @property
    def watched_step(self) -> RolloutStep:
        return self.plan.steps[self.watched]

    @property
    def is_over(self) -> bool:
        return self.phase.is_over


class PoolSeen(Struct, frozen=True):
    ready: int | None = 0  # replicas; None: nobody knows, as when a gateway has just begun
    can_take: float | None = None  # share of the model's traffic that they can serve now; None: nobody knows


class Seen(Struct, frozen=True):
    """Observations beside the evidence."""

    old: PoolSeen
    new: PoolSeen
    weights: dict[str, float]  # in force, of every version of the route
    shadow: dict[str, float]
    changed_by: str | None = None  # who changed the shares after the rollout did; None: nobody
    order: OperatorOrder | None = None  # the newest
    has_old: bool = True  # the versions are still declared
    has_new: bool = True


class Targets(Struct, frozen=True):
    """`weights` and `shadow`: None where they are left as they are."""

    weights: dict[str, float] | None
    shadow: dict[str, float] | None
    capacity: dict[str, float]  # share of the model's traffic that each version's pool is to be sized for
    park: tuple[str, ...] = ()  # versions whose replicas may be parked, but not stopped
    until: float | None = None  # how long `capacity` and `park` hold the old version's pool


class Decision(Struct, frozen=True):
    state: RolloutState
    entry: StoryEntry | None = None  # None: nothing changed
    gates: list[GateResult] = field(default_factory=list)  # as they are now


def shares_of(state: RolloutState, step: RolloutStep | None) -> tuple[dict[str, float], dict[str, float]]:
    """Weights and shadow shares that a step asks for. The two versions share what both had; others keep theirs."""
    weights, shadow = dict(state.weights_before), dict(state.shadow_before)
    if step is None:
        return weights, shadow
    both = weights.get(state.old, 0.0) + weights.get(state.new, 0.0) or WHOLE
    share = step.share or 0.0
    weights[state.old], weights[state.new] = both * (1.0 - share), both * share
    shadow[state.new] = step.shadow or 0.0
    return weights, shadow


def targets(state: RolloutState) -> Targets:
    """Returns what is to be in force in this state."""
    if state.phase is Phase.ABORTED:
        return Targets(None, None, {})
    if state.phase is Phase.ABORTING:
        return Targets(dict(state.weights_before), dict(state.shadow_before), {state.old: 1.0})
    if state.phase is Phase.PROMOTED:
        return Targets(None, None, {})
    in_force = None if state.step_in_force is None else state.plan.steps[state.step_in_force]
    weights, shadow = shares_of(state, in_force)
    if state.phase is Phase.HOLDING:
        is_parked = state.plan.on_promote == "park"
        capacity = {state.new: 1.0} | ({} if is_parked else {state.old: 1.0})
        return Targets(weights, shadow, capacity, (state.old,) if is_parked else (), state.hold_until)
    step = state.current_step
    # The old version keeps its whole capacity until the end: whoever goes back needs it at once.
    capacity = {state.old: 1.0, state.new: step.share or step.shadow or 0.0}
    if state.hands_off:
        return Targets(None, None, capacity)
    return Targets(weights, shadow, capacity)


def order_for_gateways(state: RolloutState) -> RolloutOrder:
    """Returns what gateways are to measure in this state."""
    plan = state.plan
    return RolloutOrder(
        id=state.id,
        model=state.model,
        old=state.old,
        new=state.new,
        step=state.watched,
        settle_until=state.settle_until,
        control=True,
        staying=state.staying,
        embedder=plan.embedder,
        judge=plan.judge,
        scores=plan.scores,
        prices=state.prices,
        is_measured=not state.hands_off,
        is_held=state.phase is Phase.HOLDING,
        is_over=state.phase in (Phase.PROMOTED, Phase.ABORTING, Phase.ABORTED),
    )
