"""Rollouts that the fleet's controller runs: both pools have the replicas that the shift and the way back need."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from penstock.core.rollout import BLOCK_S, Arm, Block, Cell, CellKey, Metric
from penstock.fleet.controller import Controller
from penstock.fleet.settings import FleetSettings
from penstock.rollout.desk import start_rollout
from penstock.rollout.policy.state import Phase
from penstock.rollout.runner import Live
from penstock.tenancy.rollouts import Rollout, RolloutVerb
from penstock.tenancy.routes import Declared
from penstock.tenancy.store import Store
from tests.fleet.fake_fleet import FakeFleet, leading

pytestmark = pytest.mark.slow

OLD, NEW = "chat@v1", "chat@v2"
STEPS = [
    {"shadow": 0.2, "min_s": 10, "min_requests": 5, "max_s": 15},
    {"share": 0.5, "min_s": 10, "min_requests": 5, "max_s": 15},
    {"share": 1.0, "min_s": 10, "min_requests": 5, "max_s": 15},
]
PLAN: dict[str, Any] = {"steps": STEPS, "settle_s": 0, "hold_s": 30, "capacity_wait_s": 600}


class Shift:
    """A fleet of two pools: the old one has four replicas, the new one starts at none."""

    def __init__(self, store: Store, **plan: object) -> None:
        self.fleet = FakeFleet(store)
        pools = {
            OLD: {"model": "m", "min": 4, "max": 6},
            NEW: {"model": "m", "min": 0, "max": 6, "idle_s": 5.0, "down_cooldown_s": 5.0, "price_per_hour": 2.0},
        }
        self.fleet.settings = FleetSettings(pools=pools)
        self.store = store
        self.plan = PLAN | plan
        self.most: Counter[str] = Counter()  # active replicas of the new version at each share that it had

    async def begin(self) -> Controller:
        self.store.routes.declare([Declared("chat", {"v1": 100.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0})])
        controller = await leading(self.fleet)
        await self.fleet.run(controller, 6)
        self.id = start_rollout(self.store, "chat", "v2", plan=self.plan, now=self.fleet.now).id
        return controller

    @property
    def rollout(self) -> Rollout:
        return self.store.rollouts.get(self.id)

    @property
    def share(self) -> float:
        return self.store.routes.show("chat").weights["v2"]

    def states(self, pool: str) -> dict[str, int]:
        return dict(Counter(row.state for row in self.store.fleet.replicas() if row.pool == pool))

    async def second(self, controller: Controller) -> None:
        await self.fleet.run(controller, 1)
        if self.fleet.now % BLOCK_S == 0:
            self._measure()

    async def until(self, controller: Controller, phase: Phase, *, limit_s: int = 300) -> None:
        for _ in range(limit_s):
            if self.rollout.phase == phase:
                return
            await self.second(controller)
        raise AssertionError(f"still {self.rollout.phase}: {self.states(OLD)} {self.states(NEW)}")

    def _measure(self) -> None:
        for order in self.store.rollouts.orders():
            cells = []
            for arm in (Arm.OLD, Arm.NEW, Arm.OLD_COPY, Arm.NEW_COPY):
                errors = Cell()
                for _ in range(10):
                    errors.add(0.0)
                cells.append((CellKey(Metric.ERRORS, arm), errors))
            at = self.fleet.now - BLOCK_S
            self.store.rollouts.write_blocks([Block(order.id, order.step, "g", at, BLOCK_S, cells)])


async def test_the_new_pool_has_replicas_for_its_share_before_the_share_moves(store: Store) -> None:
    shift = Shift(store)
    controller = await shift.begin()
    assert (shift.states(OLD), shift.states(NEW)) == ({"active": 4}, {})
    shift.fleet.driver.is_ready = False
    for _ in range(5):
        await shift.second(controller)
    assert shift.states(NEW) == {"starting": 1}  # for a fifth of the requests
    assert store.routes.show("chat").shadow["v2"] == 0.0
    shift.fleet.driver.is_ready = True
    before = 0.0
    for _ in range(200):
        await shift.second(controller)
        if shift.share > before:
            before = shift.share
            assert shift.states(NEW)["active"] >= 4 * before / 100
            assert shift.states(OLD)["active"] == 4
        if shift.rollout.phase == Phase.HOLDING:
            break
    assert before == 100.0
    assert shift.rollout.order.prices == {"v2": 2.0}


async def test_the_old_pool_is_held_for_the_way_back_and_then_goes_down_to_its_own_bounds(store: Store) -> None:
    shift = Shift(store)
    shift.fleet.settings.pools[OLD] |= {"min": 4, "idle_s": 5.0, "down_cooldown_s": 5.0}
    controller = await shift.begin()
    # From now on the old pool itself wants one replica only; what it has is the rollout's.
    shift.fleet.settings.pools[OLD]["min"] = 1
    controller = await leading(shift.fleet)
    await shift.until(controller, Phase.HOLDING)
    assert shift.states(OLD) == {"active": 4}
    await shift.until(controller, Phase.PROMOTED)
    for _ in range(300):
        await shift.second(controller)
        if shift.states(OLD) == {"active": 1}:
            break
    assert shift.states(OLD)["active"] == 1


async def test_an_abort_at_the_end_finds_the_old_pool_ready(store: Store) -> None:
    shift = Shift(store)
    controller = await shift.begin()
    await shift.until(controller, Phase.HOLDING)
    store.rollouts.give(shift.id, RolloutVerb.ABORT)
    assert (shift.share, shift.states(OLD)) == (0.0, {"active": 4})
    await shift.until(controller, Phase.ABORTED)


async def test_an_old_pool_that_is_to_be_parked_is_parked_and_not_stopped(store: Store) -> None:
    shift = Shift(store, on_promote="park", hold_s=200)
    shift.fleet.settings.pools[OLD] |= {"idle_s": 5.0, "down_cooldown_s": 5.0, "parked": None}
    controller = await shift.begin()
    shift.fleet.settings.pools[OLD]["min"] = 1
    controller = await leading(shift.fleet)
    await shift.until(controller, Phase.HOLDING)
    for _ in range(150):
        await shift.second(controller)
        if shift.states(OLD) == {"active": 1, "parked": 3}:
            break
    assert shift.states(OLD) == {"active": 1, "parked": 3}


async def test_a_controller_that_takes_over_goes_on_with_the_rollout(store: Store) -> None:
    shift = Shift(store)
    controller = await shift.begin()
    while not shift.share:
        await shift.second(controller)
    again = await leading(shift.fleet)  # the first one was killed
    await shift.until(again, Phase.PROMOTED)
    assert shift.share == 100.0


class Broken:
    """A runner with a bug."""

    def step(self) -> list[Live]:
        raise ValueError("a bug")

    def forget(self) -> None: ...

    def live(self) -> list[Live]:
        return []


async def test_replicas_are_started_and_stopped_whatever_becomes_of_rollouts(store: Store) -> None:
    shift = Shift(store)
    await shift.begin()
    shift.fleet.settings.pools[OLD]["min"] = 5
    controller = shift.fleet.controller()
    controller._rollouts = Broken()  # type: ignore[assignment]
    assert await controller.try_lead()
    for _ in range(10):
        await shift.second(controller)
    assert shift.states(OLD) == {"active": 5}
