"""Decisions: what becomes of a rollout, whatever is ordered, found or lost on the way."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.errors import Conflict
from penstock.core.rollout import BLOCK_S, Arm, Block, CellKey, Metric
from penstock.rollout.policy.decide import decide, start
from penstock.rollout.policy.evidence import Evidence
from penstock.rollout.policy.gates import evidence_for
from penstock.rollout.policy.plan import RolloutPlan
from penstock.rollout.policy.state import (
    Decision,
    OperatorAction,
    OperatorOrder,
    Phase,
    PoolSeen,
    RolloutState,
    Seen,
    StoryEntry,
    order_for_gateways,
    targets,
)
from tests.rollout.policy.blocks import BEGAN, READY, plan, seen_in_force, started, traffic
from tests.rollout.policy.blocks import block as block_of

SHORT = plan(
    steps=[
        {"shadow": 0.5, "min_s": 60, "min_requests": 50, "max_s": 300},
        {"share": 0.5, "min_s": 60, "min_requests": 50, "max_s": 300},
        {"share": 1, "min_s": 60, "min_requests": 50, "max_s": 300},
    ],
    hold_s=100,
    settle_s=0,
)
NOBODY = PoolSeen()
PARKED = PoolSeen(ready=0, can_take=0.0)  # in a pool that a fleet sizes


class Rollout:
    """A rollout whose orders are carried out at once, on a clock of its own."""

    def __init__(self, of: RolloutPlan = SHORT) -> None:
        self.state: RolloutState = started(of)
        self.evidence: Evidence = evidence_for(self.state)
        self.now = BEGAN
        self.story: list[StoryEntry] = []
        self.seen = seen_in_force(self.state)
        self.orders = 0

    def look(self, **changes: object) -> Decision:
        decision = decide(self.state, self.evidence, replace(self.seen, **changes), self.now)
        self.state = decision.state
        if decision.entry is not None:
            self.story.append(decision.entry)
        self.seen = seen_in_force(self.state, self.seen)
        return decision

    def watch(self) -> None:
        for _ in range(3):
            if self.state.phase is Phase.WATCHING:
                return
            self.look()

    def order(self, action: OperatorAction, **more: object) -> Decision:
        self.orders += 1
        return self.look(order=OperatorOrder(self.orders, action, "bob", self.now, **more))  # type: ignore[arg-type]

    def traffic(self, windows: int, *, tpot: float = 1.0, errors: float = 0.0, seed: int = 1) -> None:
        """Requests for both versions, and a look after each block."""
        is_shadow = self.state.current_step.is_shadow
        arms = (Arm.OLD_COPY, Arm.NEW_COPY) if is_shadow else (Arm.OLD, Arm.NEW)
        first, step = round((self.now - BEGAN) / BLOCK_S), self.state.step
        for block in traffic(Random(seed), windows, arms=arms, requests=40, tpot=tpot, errors=errors, step=step):
            self.add(block, at=BEGAN + first * BLOCK_S + (block.at - BEGAN))
            if self.state.step != step or self.state.phase is not Phase.WATCHING:
                return

    def add(self, block: Block, at: float) -> None:
        block.at = at
        self.now = at + BLOCK_S
        self.evidence.add(block)
        self.look()


def watching(of: RolloutPlan = SHORT) -> Rollout:
    rollout = Rollout(of)
    rollout.watch()
    return rollout


def serving() -> Rollout:
    """In the step in which the new version has half of the clients."""
    rollout = watching()
    rollout.traffic(60)
    rollout.watch()
    assert rollout.state.current_step.share == 0.5
    return rollout


def test_an_equal_version_goes_through_all_steps_is_held_and_promoted() -> None:
    rollout = watching()
    for _ in range(3):
        rollout.traffic(60)
        rollout.watch()
    assert rollout.state.phase is Phase.HOLDING
    held = targets(rollout.state)
    assert held.weights == {"v1": 0.0, "v2": 100.0}
    assert held.capacity == {"v1": 1.0, "v2": 1.0}
    rollout.now += 99.0
    rollout.look()
    assert rollout.state.phase is Phase.HOLDING
    rollout.now += 2.0
    rollout.look()
    assert rollout.state.phase is Phase.PROMOTED
    assert [entry.what for entry in rollout.story] == [
        *("watching", "step", "watching", "step", "watching", "holding", "promoted")
    ]
    assert targets(rollout.state).weights is None


def test_a_slower_version_is_aborted_in_the_shadow_step() -> None:
    rollout = watching()
    rollout.traffic(60, tpot=1.25)
    assert rollout.state.phase is Phase.ABORTING
    reason = rollout.state.reason
    assert reason.startswith("step 1, shadow 50 %: TPOT 1.2")
    assert reason.endswith("back to v1")
    rollout.look()
    assert rollout.state.phase is Phase.ABORTED
    assert rollout.state.reason == reason
    assert rollout.seen.weights == {"v1": 100.0, "v2": 0.0}


def test_a_version_that_fails_is_aborted_by_the_first_block() -> None:
    rollout = serving()
    rollout.traffic(1, errors=1.0)
    assert rollout.state.phase is Phase.ABORTING
    assert "errors" in rollout.state.reason


def test_a_version_that_fails_while_the_next_step_waits_for_capacity_is_aborted() -> None:
    rollout = serving()
    rollout.order(OperatorAction.PROMOTE)
    assert (rollout.state.phase, rollout.state.step, rollout.state.watched) == (Phase.WAITING, 2, 1)
    rollout.seen = replace(rollout.seen, new=PoolSeen(ready=1, can_take=0.5))
    block = traffic(Random(1), 1, requests=40, errors=1.0, step=1)[0]
    block.at = rollout.now
    rollout.evidence.add(block)
    rollout.look()
    assert rollout.state.phase is Phase.ABORTING


def test_a_step_waits_for_capacity_and_pauses_if_none_comes() -> None:
    rollout = Rollout()
    rollout.look(new=NOBODY)
    assert rollout.state.phase is Phase.WAITING
    assert targets(rollout.state).shadow == {"v1": 0.0, "v2": 0.0}
    assert targets(rollout.state).capacity["v2"] == 0.5
    rollout.look(new=PoolSeen(ready=1, can_take=0.2))
    assert rollout.state.step_in_force is None
    rollout.now += SHORT.capacity_wait_s
    rollout.look(new=NOBODY)
    assert rollout.state.phase is Phase.PAUSED
    assert "0 replicas" in rollout.state.reason


def test_shares_that_are_not_in_force_yet_are_waited_for() -> None:
    rollout = Rollout()
    before = rollout.seen
    rollout.look()
    assert rollout.state.step_in_force == 0
    rollout.look(weights=before.weights, shadow=before.shadow)
    assert rollout.state.phase is Phase.WAITING
    rollout.look()
    assert rollout.state.phase is Phase.WATCHING


def test_requests_are_not_measured_from_the_order_of_new_shares_on() -> None:
    rollout = Rollout(plan(steps=[{"share": 0.5}, {"share": 1}], settle_s=30))
    rollout.look()
    assert rollout.state.step_in_force == 0
    assert order_for_gateways(rollout.state).settle_until == rollout.now + 30.0
    rollout.now += 2.0
    rollout.look()
    assert rollout.state.phase is Phase.WATCHING
    assert order_for_gateways(rollout.state).settle_until == rollout.now + 30.0
    rollout.now += 100.0
    rollout.look(changed_by="carol", weights={"v1": 90.0, "v2": 10.0})
    rollout.order(OperatorAction.RESUME)
    assert order_for_gateways(rollout.state).settle_until == rollout.now + 30.0


def test_a_wall_clock_that_goes_back_stops_no_decision() -> None:
    rollout = watching(plan(steps=[{"share": 1, "min_s": 60, "min_requests": 0, "max_s": 60}], hold_s=100, settle_s=5))
    rollout.now -= 3600.0
    rollout.look()
    assert order_for_gateways(rollout.state).settle_until == rollout.now + 5.0
    rollout.now += 60.0
    rollout.look()
    assert rollout.state.phase is Phase.HOLDING
    rollout.now -= 3600.0
    rollout.look()
    rollout.now += 99.0
    rollout.look()
    assert rollout.state.phase is Phase.HOLDING
    rollout.now += 1.0
    rollout.look()
    assert rollout.state.phase is Phase.PROMOTED


def test_a_wall_clock_that_goes_back_past_a_loss_alone_counts_it_from_then_on() -> None:
    rollout = serving()
    rollout.now += 100.0
    rollout.look(new=NOBODY)
    rollout.now -= 50.0  # the step began before
    rollout.look(new=NOBODY)
    rollout.now += SHORT.unready_s - 1.0
    rollout.look(new=NOBODY)
    assert rollout.state.phase is Phase.WATCHING
    rollout.now += 1.0
    rollout.look(new=NOBODY)
    assert rollout.state.phase is Phase.ABORTING


def test_too_few_requests_pause_it_in_the_end() -> None:
    rollout = watching()
    rollout.now += 4 * 300.0
    rollout.look()
    assert rollout.state.phase is Phase.PAUSED
    assert "0 of the 50 requests" in rollout.state.reason


@pytest.mark.parametrize(
    ("undecided", "phase"), [("pause", Phase.PAUSED), ("abort", Phase.ABORTING), ("proceed", Phase.WAITING)]
)
def test_what_is_undecided_at_the_end_of_a_step_does_what_the_plan_says(undecided: str, phase: Phase) -> None:
    steps = [{"shadow": 0.5, "min_s": 10, "min_requests": 1, "max_s": 10, "undecided": undecided}, {"share": 1}]
    rollout = watching(plan(steps=steps, settle_s=0))
    rollout.traffic(2)
    assert rollout.state.phase is phase
    assert "undecided" in rollout.state.reason


def test_shares_changed_by_hand_pause_it_until_it_is_resumed() -> None:
    rollout = serving()
    mine = rollout.seen
    rollout.look(changed_by="carol", weights={"v1": 90.0, "v2": 10.0})
    assert rollout.state.phase is Phase.PAUSED
    assert "carol" in rollout.state.reason
    assert targets(rollout.state).weights is None
    assert not order_for_gateways(rollout.state).is_measured
    rollout.traffic(5, errors=1.0)
    assert rollout.state.phase is Phase.PAUSED  # whoever set the shares has the say
    rollout.evidence = evidence_for(rollout.state)
    rollout.seen = replace(mine, weights={"v1": 90.0, "v2": 10.0})
    rollout.order(OperatorAction.RESUME)
    assert targets(rollout.state).weights == {"v1": 50.0, "v2": 50.0}
    rollout.watch()
    assert rollout.state.phase is Phase.WATCHING
    assert rollout.state.step == 1


def test_a_paused_one_is_aborted_all_the_same_if_it_is_worse() -> None:
    rollout = serving()
    rollout.order(OperatorAction.PAUSE, reason="lunch")
    assert "lunch" in rollout.state.reason
    block = traffic(Random(1), 1, requests=40, errors=1.0, step=1)[0]
    rollout.add(block, at=rollout.now)
    assert rollout.state.phase is Phase.ABORTING


def test_an_abort_ends_also_where_there_is_no_version_to_go_back_to() -> None:
    rollout = serving()
    rollout.state = replace(rollout.state, weights_before={"v1": 100.0, "v2": 0.0})
    gone = {"has_old": False, "weights": {"v2": 50.0}, "shadow": {"v2": 0.0}}
    rollout.seen = replace(rollout.seen, order=OperatorOrder(9, OperatorAction.ABORT, "bob", rollout.now))
    assert (
        decide(rollout.state, rollout.evidence, replace(rollout.seen, **gone), rollout.now).state.phase
        is Phase.ABORTING
    )
    rollout.look()
    rollout.look(**gone)
    assert rollout.state.phase is Phase.ABORTED
    assert "nothing to go back to" in rollout.story[-1].reason


def test_a_lasting_loss_of_all_replicas_of_a_version_that_has_clients_aborts() -> None:
    rollout = serving()
    rollout.look(new=NOBODY)
    rollout.now += SHORT.unready_s - 1.0
    rollout.state = msgspec.json.decode(msgspec.json.encode(rollout.state), type=RolloutState)  # another runner goes on
    rollout.look(new=NOBODY)
    assert rollout.state.phase is Phase.WATCHING
    rollout.now += 1.0
    rollout.look(new=NOBODY)
    assert rollout.state.phase is Phase.ABORTING
    assert rollout.state.reason == "v2 has had no ready replica for 15 s, and clients are sent to it: back to v1"


def test_copies_that_find_no_replica_abort_nothing() -> None:
    shadow = watching()
    for _ in range(10):
        shadow.look(new=NOBODY)
        shadow.now += 10.0
    assert shadow.state.phase is Phase.WATCHING


def test_a_short_loss_of_all_replicas_aborts_nothing_and_passes_no_step() -> None:
    rollout = serving()
    for _ in range(10):
        rollout.look(new=NOBODY)
        rollout.now += SHORT.unready_s - 1.0
        rollout.look()
        rollout.now += 1.0
    assert rollout.state.phase is Phase.WATCHING
    rollout.traffic(20)
    rollout.state = replace(rollout.state, phase=Phase.WATCHING, step=1, step_in_force=1, since=rollout.now - 100.0)
    rollout.look(new=NOBODY)
    assert rollout.state.phase is Phase.WATCHING
    rollout.look()
    assert rollout.state.phase is Phase.WAITING


def test_replicas_that_nobody_knows_of_are_no_loss_and_no_capacity() -> None:
    unknown = PoolSeen(ready=None)
    rollout = serving()
    rollout.look(new=NOBODY)
    for _ in range(10):
        rollout.now += 10.0
        rollout.look(old=unknown, new=unknown)
    rollout.look(new=NOBODY)
    assert rollout.state.phase is Phase.WATCHING
    waiting = Rollout()
    waiting.look(new=unknown)
    assert (waiting.state.phase, waiting.state.step_in_force) == (Phase.WAITING, None)
    waiting.now += SHORT.capacity_wait_s
    waiting.look(new=unknown)
    assert waiting.state.phase is Phase.PAUSED
    assert waiting.state.reason.endswith("nobody knows its replicas")


def test_looks_of_which_nobody_knows_do_not_begin_a_loss_anew() -> None:
    rollout = serving()
    for _ in range(int(SHORT.unready_s)):
        rollout.look(new=NOBODY)
        assert rollout.state.phase is Phase.WATCHING
        rollout.now += 1.0
        rollout.look(new=PoolSeen(ready=None))
        assert rollout.state.phase is Phase.WATCHING
        rollout.now += 1.0
    rollout.look(new=NOBODY)
    assert rollout.state.phase is Phase.ABORTING
    assert rollout.state.reason.startswith("v2 has had no ready replica for 15 s")


def test_where_neither_version_has_a_replica_nothing_is_won_by_going_back() -> None:
    rollout = serving()
    for _ in range(10):
        rollout.look(old=NOBODY, new=NOBODY)
        rollout.now += 10.0
    assert rollout.state.phase is Phase.WATCHING


def test_a_version_that_is_gone_ends_it() -> None:
    rollout = serving()
    rollout.look(has_new=False)
    rollout.now += SHORT.unready_s
    rollout.look(has_new=False)
    assert rollout.state.phase is Phase.ABORTING
    assert rollout.state.reason == "v2 has been no version of m for 15 s: back to v1"
    rollout = serving()
    rollout.look(has_old=False)
    assert rollout.state.phase is Phase.PAUSED


def test_a_version_that_is_gone_for_a_moment_ends_nothing() -> None:
    rollout = serving()
    for _ in range(10):
        rollout.look(has_new=False)
        rollout.now += SHORT.unready_s - 1.0
        rollout.look(has_new=False)
        rollout.look()
        rollout.now += 1.0
    assert rollout.state.phase is Phase.WATCHING
    rollout.look(has_new=False)
    rollout.look(has_new=False, order=OperatorOrder(9, OperatorAction.ABORT, "bob", rollout.now))
    assert rollout.state.phase is Phase.ABORTING
    rollout = serving()
    rollout.look(has_new=False, changed_by="carol")  # another hand is told of once
    assert (rollout.state.phase, rollout.state.hands_off) == (Phase.PAUSED, True)


def test_an_admin_goes_back_from_a_held_version_at_once() -> None:
    rollout = watching()
    rollout.order(OperatorAction.PROMOTE, is_full=True)
    rollout.watch()
    rollout.order(OperatorAction.PROMOTE)
    assert rollout.state.phase is Phase.HOLDING
    rollout.order(OperatorAction.ABORT)
    rollout.look()
    assert rollout.state.phase is Phase.ABORTED
    assert rollout.seen.weights == {"v1": 100.0, "v2": 0.0}


def test_the_last_step_can_be_passed_before_its_shares_are_in_force() -> None:
    rollout = watching(plan(steps=[{"share": 0.1}, {"share": 1}], settle_s=5, hold_s=100))
    rollout.order(OperatorAction.PROMOTE)
    few = PoolSeen(ready=1, can_take=0.5)
    rollout.look(new=few)
    rollout.now += SHORT.capacity_wait_s
    rollout.look(new=few)
    assert (rollout.state.phase, rollout.state.watched) == (Phase.PAUSED, 0)
    rollout.order(OperatorAction.PROMOTE)
    assert rollout.state.phase is Phase.HOLDING
    assert targets(rollout.state).weights == {"v1": 0.0, "v2": 100.0}
    order = order_for_gateways(rollout.state)
    assert (order.step, order.settle_until) == (1, rollout.now + 5.0)
    rollout.now += 100.0
    rollout.look()
    assert rollout.state.phase is Phase.PROMOTED


def test_an_order_is_obeyed_once() -> None:
    rollout = watching()
    order = OperatorOrder(1, OperatorAction.PROMOTE, "bob")
    rollout.look(order=order)
    assert rollout.state.step == 1
    rollout.watch()
    rollout.look(order=order)
    assert rollout.state.step == 1


def held(**changes: object) -> Rollout:
    """All clients are at the new version, after a step in which half of them were."""
    steps = [{"share": 0.5, "min_s": 60, "min_requests": 50, "max_s": 60}, {"share": 1, "min_s": 0, "min_requests": 1}]
    rollout = watching(plan(**{"steps": steps, "settle_s": 0, "hold_s": 600} | changes))
    rollout.traffic(20)
    rollout.watch()
    rollout.order(OperatorAction.PROMOTE)
    assert rollout.state.phase is Phase.HOLDING
    return rollout


@pytest.mark.parametrize("on_promote", ["hold", "park"])
def test_a_version_that_fails_while_the_old_one_is_held_is_aborted(on_promote: str) -> None:
    rollout = held(on_promote=on_promote)
    order = order_for_gateways(rollout.state)
    assert (order.is_over, order.is_held, order.step) == (False, True, 1)
    for _ in range(3):
        block = traffic(Random(1), 1, requests=100, errors=1.0, step=1)[0]
        block.cells = [(key, cell) for key, cell in block.cells if key.arm is Arm.NEW]
        if rollout.state.phase is Phase.HOLDING:
            rollout.add(block, at=rollout.now)
    assert rollout.state.phase is Phase.ABORTING
    assert rollout.state.reason.startswith("holding v1: errors")
    assert rollout.state.reason.endswith("back to v1")
    assert rollout.story[-1].gates[0].verdict == "worse"
    assert targets(rollout.state).weights == {"v1": 100.0, "v2": 0.0}


@pytest.mark.parametrize(("on_promote", "old"), [("hold", READY), ("park", PARKED)])
def test_a_lasting_loss_of_all_replicas_while_the_old_version_is_held_aborts(on_promote: str, old: PoolSeen) -> None:
    rollout = held(on_promote=on_promote)
    rollout.look(old=old, new=NOBODY)
    assert rollout.state.phase is Phase.HOLDING
    rollout.now += 600.0
    rollout.look(old=old, new=NOBODY)
    assert rollout.state.phase is Phase.ABORTING


def test_refusals_of_another_hour_are_not_held_against_a_version_in_the_hold() -> None:
    rollout = held()
    rollout.add(block_of(rollout.now, [(CellKey(Metric.REFUSALS, Arm.OLD), [0.0] * 1000)]), at=rollout.now)
    for _ in range(10):
        rollout.add(block_of(rollout.now, [(CellKey(Metric.REFUSALS, Arm.NEW), [1.0] * 100)], step=1), at=rollout.now)
    decision = rollout.look()
    assert rollout.state.phase is Phase.HOLDING
    assert "refusals" not in [gate.gate for gate in decision.gates]


def test_nobody_wakes_parked_replicas_where_no_fleet_does() -> None:
    rollout = held(on_promote="park")
    for _ in range(10):
        rollout.look(old=NOBODY, new=NOBODY)
        rollout.now += 10.0
    assert rollout.state.phase is Phase.HOLDING


def test_no_version_is_promoted_in_the_moment_in_which_it_has_no_replica() -> None:
    rollout = held()
    rollout.now = rollout.state.hold_until
    rollout.look(new=NOBODY)
    assert rollout.state.phase is Phase.HOLDING
    rollout.look()
    assert rollout.state.phase is Phase.PROMOTED


def test_a_version_that_is_released_at_once_is_promoted_at_the_next_look() -> None:
    rollout = held(on_promote="release")
    rollout.look()
    assert rollout.state.phase is Phase.PROMOTED


def test_gates_are_told_while_the_old_version_is_held() -> None:
    rollout = held()
    block = traffic(Random(1), 1, requests=100, step=1)[0]
    rollout.add(block, at=rollout.now)
    assert {gate.gate for gate in rollout.look().gates} == {"errors"}


def test_a_parked_version_may_be_parked_but_not_stopped() -> None:
    rollout = watching(plan(steps=[{"share": 1}], on_promote="park", hold_s=50))
    rollout.order(OperatorAction.PROMOTE)
    aim = targets(rollout.state)
    assert (aim.park, aim.until, "v1" in aim.capacity) == (("v1",), rollout.now + 50.0, False)


def test_other_versions_keep_their_weight() -> None:
    state = start(
        "r",
        model="m",
        old="v1",
        new="v2",
        plan=plan(steps=[{"share": 0.5}, {"share": 1}]),
        now=BEGAN,
        weights={"v1": 60.0, "v2": 20.0, "v3": 20.0},
        shadow={},
    ).state
    assert targets(replace(state, step_in_force=0)).weights == {"v1": 40.0, "v2": 40.0, "v3": 20.0}


def test_there_is_nothing_to_do_for_one_version() -> None:
    for new, said in (("v1", "already"), ("v9", "no version 'v9'")):
        with pytest.raises(Conflict, match=said):
            start("r", model="m", old="v1", new=new, plan=plan(), now=0.0, weights={"v1": 1.0, "v2": 0.0}, shadow={})


def test_gateways_measure_the_step_that_is_in_force() -> None:
    rollout = serving()
    order = order_for_gateways(rollout.state)
    assert (order.step, order.old, order.new, order.is_over) == (1, "v1", "v2", False)
    rollout.order(OperatorAction.ABORT)
    assert order_for_gateways(rollout.state).is_over


LOOKS = st.lists(
    st.one_of(
        st.sampled_from([*OperatorAction]),
        st.sampled_from(["block", "bad block", "nobody ready", "by hand", "no old", "no new", "later", "restart"]),
    ),
    max_size=25,
)


@given(LOOKS)
def test_any_order_of_orders_and_losses_leaves_a_legal_state(events: list[OperatorAction | str]) -> None:
    rollout = Rollout()
    may_serve = False  # a shadow step was passed, or an admin said so
    for event in events:
        before = rollout.state
        if isinstance(event, OperatorAction):
            rollout.order(event)
            may_serve |= event is OperatorAction.PROMOTE
        elif event in ("block", "bad block"):
            shadow = rollout.state.watched_step.is_shadow
            arms = (Arm.OLD_COPY, Arm.NEW_COPY) if shadow else (Arm.OLD, Arm.NEW)
            errors = float(event == "bad block")
            made = traffic(Random(1), 1, arms=arms, requests=60, errors=errors, step=rollout.state.watched)[0]
            rollout.add(made, at=rollout.now)
        elif event == "later":
            rollout.now += 400.0
            rollout.look()
        elif event == "restart":
            kept = msgspec.json.decode(msgspec.json.encode(rollout.state), type=RolloutState)
            assert kept == rollout.state
            rollout.state = kept
        else:
            changes = {
                "nobody ready": {"new": NOBODY},
                "by hand": {"changed_by": "carol"},
                "no old": {"has_old": False},
                "no new": {"has_new": False},
            }
            rollout.look(**changes[event])
        state = rollout.state
        may_serve |= before.step == 0 and state.step == 1 and state.phase is Phase.WAITING
        assert 0 <= state.step < len(SHORT.steps)
        assert state.step >= before.step
        assert not before.is_over or state == before
        assert before.phase is not Phase.ABORTING or state.phase in (Phase.ABORTING, Phase.ABORTED)
        assert state.hands_off <= (state.phase is Phase.PAUSED)
        aim = targets(state)
        if aim.weights is not None:
            assert sum(aim.weights.values()) == pytest.approx(100.0)
            assert may_serve or aim.weights["v2"] == 0.0
        if state.phase not in (Phase.PROMOTED, Phase.ABORTED, Phase.HOLDING):
            assert aim.capacity["v1"] == 1.0


def test_seen_is_plain_data() -> None:
    seen = Seen(READY, READY, {"v1": 1.0}, {}, "carol", OperatorOrder(1, OperatorAction.ABORT, "bob"))
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Seen) == seen
