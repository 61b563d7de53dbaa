"""The runner over a real store: blocks are written as gateways write them, and seconds pass when the test says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from typing import Any

import pytest

from penstock.core.errors import LeaseLost
from penstock.core.rollout import BLOCK_S, Arm, Block, Cell, CellKey, Metric
from penstock.observe.background import errors
from penstock.rollout.desk import rollout_document, start_rollout, story_of
from penstock.rollout.policy.state import Phase, PoolSeen
from penstock.rollout.runner import Capacity, RolloutRunner
from penstock.tenancy.database import Execute
from penstock.tenancy.lease import LeaseKeeper
from penstock.tenancy.rollouts import MAX_BLOCKS, Rollout, RolloutVerb
from penstock.tenancy.routes import Declared, SharesAsked
from penstock.tenancy.store import Store

pytestmark = pytest.mark.slow

READY = PoolSeen(2)
STEPS = [
    {"shadow": 0.2, "min_s": 20, "min_requests": 20, "max_s": 60},
    {"share": 0.1, "min_s": 20, "min_requests": 20, "max_s": 60},
    {"share": 1.0, "min_s": 20, "min_requests": 20, "max_s": 60},
]
PATIENT = [STEPS[0] | {"min_s": 600, "max_s": 1200}, *STEPS[1:]]  # there is time enough to find a difference
PLAN: dict[str, Any] = {"steps": STEPS, "settle_s": 5, "hold_s": 60, "capacity_wait_s": 30}


class World:
    """A gateway that measures, replicas that are ready, and a runner that may be killed."""

    def __init__(self, store: Store, **plan: object) -> None:
        self.store = store
        self.now = 1_000_000.0
        self.timer_s = 0.0
        self.ready = {"v1": 2, "v2": 2}
        self.has_lease = True
        self.is_killed = False
        self.broken = ""  # a model whose rollout cannot be decided
        self.slower = 1.0  # than the old one, the new version
        self.failing = 0.0  # of the new version's requests
        self.runner = self.new_runner()
        self.id = start_rollout(store, "chat", "v2", plan=PLAN | plan, by="root", now=self.now).id

    def new_runner(self) -> RolloutRunner:
        return RolloutRunner(self.store, self._fenced, self._capacity, lambda: self.now, lambda: self.timer_s)

    @contextmanager
    def _fenced(self) -> Iterator[Execute]:
        if not self.has_lease:
            raise LeaseLost("another has it")
        with self.store._database.writing() as execute:
            yield execute
            if self.is_killed:
                raise Killed

    def _capacity(self, rollout: Rollout) -> Capacity:
        if rollout.model == self.broken:
            raise ValueError("a bug")
        return Capacity(PoolSeen(self.ready[rollout.old]), PoolSeen(self.ready[rollout.new]))

    def write_blocks(self, count: int) -> None:
        cells = [(CellKey(Metric.ERRORS, Arm.NEW_COPY), Cell(1, 0.0, 0.0))]
        blocks = (Block(self.id, 0, f"g{number}", self.now, BLOCK_S, cells) for number in range(count))
        self.store.rollouts.write_blocks(blocks)

    @property
    def rollout(self) -> Rollout:
        return self.store.rollouts.get(self.id)

    @property
    def weights(self) -> dict[str, float]:
        return self.store.routes.show("chat").weights

    @property
    def whats(self) -> list[str]:
        return [entry.what for entry in story_of(self.store.rollouts, self.id)]

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.runner.step()
            self.now += 1.0
            if self.now % BLOCK_S == 0:
                self.measure()

    def run_until(self, phase: Phase, *, limit_s: int = 2000) -> None:
        for _ in range(limit_s):
            if self.rollout.phase == phase:
                return
            self.run(1)
        raise AssertionError(f"still {self.rollout.phase}: {rollout_document(self.rollout)['reason']}")

    def measure(self) -> None:
        """A block of the seconds that have passed, of as many requests for either version."""
        for order in self.store.rollouts.orders():
            shares = self.store.routes.show("chat")
            arms = []
            if shares.shadow["v2"]:
                arms += [Arm.OLD_COPY, Arm.NEW_COPY]
            if shares.weights["v2"]:
                arms += [Arm.NEW]
            if shares.weights["v1"]:
                arms += [Arm.OLD]
            cells = [cell for arm in arms for cell in self._cells(arm)]
            at = self.now - BLOCK_S
            if at >= order.settle_until:
                self.store.rollouts.write_blocks([Block(order.id, order.step, "g", at, BLOCK_S, cells)])

    def _cells(self, arm: Arm) -> list[tuple[CellKey, Cell]]:
        is_new = arm in (Arm.NEW, Arm.NEW_COPY)
        times, errors = Cell(), Cell()
        for number in range(20):
            wobble = 0.01 * (number % 5 - 2)
            times.add(log(0.05) + wobble + (log(self.slower) if is_new else 0.0), binned=True)
            errors.add(1.0 if is_new and number < 20 * self.failing else 0.0)
        found = [(CellKey(Metric.TPOT, arm), times), (CellKey(Metric.ERRORS, arm), errors)]
        stratum = Cell(times.count, times.total, times.squares)
        return [*found, (CellKey(Metric.TPOT, arm, "1"), stratum)]


class Killed(BaseException):
    """The runner's process ends here."""


@pytest.fixture
def world(store: Store) -> World:
    return World(store)


def test_an_equal_version_goes_through_all_steps_and_is_promoted(world: World) -> None:
    seen = []
    for _ in range(400):
        world.run(1)
        if not seen or seen[-1] != world.weights["v2"]:
            seen.append(world.weights["v2"])
        if world.rollout.is_over:
            break
    assert seen == [0.0, 10.0, 100.0]
    assert world.rollout.phase == Phase.PROMOTED
    assert world.whats[0] == "started"
    assert world.whats[-2:] == ["holding", "promoted"]
    assert world.store.routes.show("chat").shadow["v2"] == 0.0
    assert world.store.rollouts.orders() == ()


def test_a_version_that_is_slower_is_found_before_a_client_is_served_by_it(store: Store) -> None:
    world = World(store, steps=PATIENT)
    world.slower = 2.0
    world.run_until(Phase.ABORTED)
    assert all(one.weights.get("v2", 0.0) == 0.0 for one in world.store.routes.history("chat"))
    reason = rollout_document(world.rollout)["reason"]
    assert "worse" in reason or "slower" in reason
    aborting = next(one for one in story_of(world.store.rollouts, world.id) if one.what == "aborting")
    assert any(gate.verdict == "worse" and gate.gate.startswith("tpot") for gate in aborting.gates)


def test_a_version_that_fails_for_clients_is_aborted_and_the_shares_go_back_in_the_same_moment(world: World) -> None:
    while not world.weights["v2"]:
        world.run(1)
    world.failing = 1.0
    while world.rollout.phase != Phase.ABORTING:
        world.run(1)
    assert world.weights == {"v1": 100.0, "v2": 0.0}
    world.run_until(Phase.ABORTED)
    assert world.store.routes.show("chat").last.restores == 0


def test_capacity_is_waited_for_before_a_step_and_for_ever_by_nobody(world: World) -> None:
    world.ready["v2"] = 0
    world.run(10)
    assert (world.rollout.phase, world.store.routes.show("chat").shadow["v2"]) == (Phase.WAITING, 0.0)
    world.run_until(Phase.PAUSED)
    world.ready["v2"] = 1
    world.store.rollouts.give(world.id, RolloutVerb.RESUME, by="root")
    world.run(3)
    assert world.rollout.phase == Phase.WATCHING
    assert world.store.routes.show("chat").shadow["v2"] == 0.2


def test_whoever_is_killed_while_writing_leaves_nothing_half_done(world: World) -> None:
    kills = 0
    while not world.rollout.is_over:
        before = (world.rollout, world.weights, world.whats)
        world.is_killed = True
        try:
            world.runner.step()
        except Killed:
            kills += 1
            assert (world.rollout, world.weights, world.whats) == before
        world.is_killed = False
        world.runner = world.new_runner()  # another goes on
        world.run(4)
    assert world.rollout.phase == Phase.PROMOTED
    assert kills > 5
    assert world.whats.count("started") == world.whats.count("promoted") == 1


def test_who_comes_after_decides_as_the_one_before_would_have(store: Store) -> None:
    world = World(store, steps=PATIENT)
    world.slower = 2.0
    world.run(42)
    world.runner = world.new_runner()
    world.run_until(Phase.ABORTED)
    assert all(one.weights.get("v2", 0.0) == 0.0 for one in world.store.routes.history("chat"))


def test_who_has_lost_the_lease_changes_nothing(world: World) -> None:
    world.has_lease = False
    with pytest.raises(LeaseLost):
        world.run(5)
    assert (world.weights["v2"], world.whats) == (0.0, ["started"])


def test_shares_that_somebody_else_changes_pause_it_and_are_left_alone(world: World) -> None:
    while not world.weights["v2"]:
        world.run(1)
    world.store.routes.change("chat", SharesAsked({"v1": 60.0, "v2": 40.0}), by="anna")
    world.run(10)
    assert (world.rollout.phase, world.weights) == (Phase.PAUSED, {"v1": 60.0, "v2": 40.0})
    assert "anna" in rollout_document(world.rollout)["reason"]
    world.store.rollouts.give(world.id, RolloutVerb.RESUME, by="anna")
    world.run(5)
    assert (world.rollout.phase, world.weights["v2"]) == (Phase.WATCHING, 10.0)


def test_an_operator_pauses_goes_on_and_aborts(world: World) -> None:
    world.run(8)
    book = world.store.rollouts
    book.give(world.id, RolloutVerb.PAUSE, by="root")
    world.run(60)
    assert (world.rollout.phase, world.weights["v2"]) == (Phase.PAUSED, 0.0)
    assert world.rollout.command is None
    book.give(world.id, RolloutVerb.RESUME, by="root")
    while not world.weights["v2"]:
        world.run(1)
    book.give(world.id, RolloutVerb.ABORT, by="root", reason="it smells")
    assert world.weights["v2"] == 0.0
    world.run_until(Phase.ABORTED)
    assert "it smells" in next(one.reason for one in story_of(book, world.id) if one.what == "aborting")


def test_promoted_in_full_goes_to_the_last_step(world: World) -> None:
    world.run(3)
    world.store.rollouts.give(world.id, RolloutVerb.PROMOTE, by="root", is_full=True)
    world.run(3)
    assert world.weights == {"v1": 0.0, "v2": 100.0}


def test_a_rollout_of_another_runner_is_left_to_it(world: World) -> None:
    runner = RolloutRunner(world.store, world._fenced, lambda rollout: None, lambda: world.now)
    assert runner.step() == []
    assert world.whats == ["started"]


def test_what_was_held_can_be_gone_back_to_at_once(world: World) -> None:
    world.run_until(Phase.HOLDING)
    assert world.weights == {"v1": 0.0, "v2": 100.0}
    world.store.rollouts.give(world.id, RolloutVerb.ABORT)
    assert world.weights == {"v1": 100.0, "v2": 0.0}
    world.run_until(Phase.ABORTED)


def test_a_rollout_that_cannot_be_decided_is_in_no_others_way(world: World, caplog: pytest.LogCaptureFixture) -> None:
    store = world.store
    store.routes.declare([Declared("other", {"a": 100.0, "b": 0.0}, {"a": 0.0, "b": 0.0})])
    world.ready |= {"a": 1, "b": 1}
    other = start_rollout(store, "other", "b", plan=PLAN | {"steps": STEPS[1:]}, now=world.now)
    before = errors().get("rollout runner", 0)
    world.broken = "chat"
    rounds = [world.runner.step() for _ in range(3)]
    assert store.routes.show("other").weights["b"] == 10.0
    assert errors()["rollout runner"] == before + 3
    assert caplog.text.count("cannot be decided") == 1
    for found in rounds:
        assert {live.rollout.id for live in found} == {world.id, other.id}
        assert next(live.targets.capacity for live in found if live.rollout.id == world.id)  # its pools are kept
    world.broken = ""
    world.run(3)
    assert world.rollout.phase == Phase.WATCHING


def test_blocks_are_read_a_page_at_a_time(world: World) -> None:
    book, count = world.store.rollouts, 2 * MAX_BLOCKS + 3
    world.write_blocks(count)
    newest, found = book.blocks(world.id)
    assert (newest, len(found)) == (MAX_BLOCKS, MAX_BLOCKS)
    world.runner.step()
    newest, evidence = world.runner._evidence[world.id]
    assert (newest, evidence.new_requests(0)) == (count, count)


class SlowBook:
    """The store's, to which a page of blocks takes two seconds."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._book = world.store.rollouts
        self.pages: list[int] = []  # numbers that they begin after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._book, name)

    def blocks(self, id: str, since: int = 0) -> tuple[int, list[Block]]:
        self._world.timer_s += 2.0
        self.pages.append(since)
        return self._book.blocks(id, since)


def test_to_take_over_a_long_rollout_takes_rounds_and_costs_no_lease(world: World) -> None:
    keeper = LeaseKeeper(world.store.fleet, "f", "me", 3.0, lambda: world.timer_s)
    runner = RolloutRunner(
        world.store, keeper.fenced, lambda rollout: Capacity(READY, READY), lambda: world.now, lambda: world.timer_s
    )
    book = runner._book = SlowBook(world)  # type: ignore[assignment]
    world.write_blocks(2 * MAX_BLOCKS + 3)
    assert keeper.try_take()
    for _ in range(2):
        (live,) = runner.step()
        assert live.targets.capacity  # its pools are kept
        assert world.rollout.revision == live.rollout.revision
        assert world.weights["v2"] == 0.0
    assert world.store.routes.show("chat").shadow["v2"] == 0.0
    runner.step()
    assert world.store.routes.show("chat").shadow["v2"] == 0.2
    assert book.pages == [0, MAX_BLOCKS, 2 * MAX_BLOCKS]


def test_a_runner_that_lost_the_lease_while_it_read_goes_on_where_it_was(world: World) -> None:
    book = world.runner._book = SlowBook(world)  # type: ignore[assignment]
    world.write_blocks(MAX_BLOCKS + 3)
    world.has_lease = False
    with pytest.raises(LeaseLost):
        world.runner.step()
    world.has_lease = True
    world.runner.step()
    assert book.pages == [0, MAX_BLOCKS]
    assert world.store.routes.show("chat").shadow["v2"] == 0.2
