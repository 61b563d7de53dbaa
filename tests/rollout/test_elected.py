"""Threads of several gateways over one store: one of them runs the rollouts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.core.errors import StoreUnavailable
from penstock.core.rollout import RolloutOrder
from penstock.rollout.desk import start_rollout
from penstock.rollout.elected import ElectedRunner, lease_of
from penstock.tenancy import fleet as tables
from penstock.tenancy.fleet import PoolStatus
from penstock.tenancy.rollouts import Rollout, RolloutBook, RolloutVerb
from penstock.tenancy.routes import Declared
from penstock.tenancy.store import Store, open_store
from tests.waiting import eventually

LEASE = lease_of("chat")


class Versions:
    """A gateway's: two ready replicas of each that it has."""

    def __init__(self, *missing: str) -> None:
        self.missing = set(missing)
        self.asked = 0

    def has(self, model: str, version: str) -> bool:
        self.asked += 1
        return f"{model}@{version}" not in self.missing

    def num_ready(self, model: str, version: str) -> int | None:
        return 2 if self.has(model, version) else None


@contextmanager
def elected(
    url: str, told: list[list[Rollout]] | None = None, *, dies: bool = False, versions: Versions | None = None
) -> Iterator[ElectedRunner]:
    """`dies`: it leaves its lease behind, as a process that is killed."""
    runner = ElectedRunner(open_store(url), lease_s=0.3, every_s=0.02)
    runner.start(versions or Versions(), told.append if told is not None else lambda found: None)
    yield runner
    if dies:
        for turn in runner._turns.values():
            turn.keeper.release = lambda: None  # type: ignore[method-assign]
    runner.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'penstock.db'}"


def begin(store: Store, *runners: ElectedRunner) -> Rollout:
    rollout = start_rollout(store, "chat", "v2", plan={"steps": [{"share": 0.1, "max_s": 1e6}, {"share": 1}]})
    for runner in runners:
        runner.apply([rollout.order])
    return rollout


def share(store: Store) -> float:
    return store.routes.show("chat").weights["v2"]


def test_a_gateway_sleeps_until_there_is_a_rollout_and_runs_it(store: Store, url: str) -> None:
    told: list[list[Rollout]] = []
    with elected(url, told) as runner:
        eventually(lambda: told == [[]])
        assert store.fleet.lease(LEASE) is None
        begun = begin(store, runner)
        eventually(lambda: share(store) == 10.0)
        eventually(lambda: [one.id for one in told[-1]] == [begun.id])


def test_another_goes_on_when_the_holder_is_killed(store: Store, url: str) -> None:
    with elected(url) as second:
        with elected(url, dies=True) as first:
            begun = begin(store, first)
            eventually(lambda: share(store) == 10.0)
        holder = store.fleet.lease(LEASE)
        second.apply([begun.order])
        store.rollouts.give(begun.id, RolloutVerb.PROMOTE)
        eventually(lambda: share(store) == 100.0)
        assert store.fleet.lease(LEASE) != holder


def test_what_a_fleet_runs_is_left_to_its_controller(store: Store, url: str) -> None:
    lease = store.fleet.take_lease("f", "a", None)
    assert lease is not None
    with store.fleet.fenced("f", lease) as execute:
        for pool in ("chat@v1", "chat@v2"):
            tables.write_pool(execute, PoolStatus(pool, time.time() + 3600, fleet="f"))
    told: list[list[Rollout]] = []
    with elected(url, told) as runner:
        begun = begin(store, runner)
        seen = len(told)
        eventually(lambda: len(told) > seen + 3)  # rounds
        assert store.rollouts.get(begun.id) == begun
        assert store.fleet.lease(LEASE) is None
        with store.fleet.fenced("f", lease) as execute:
            tables.write_pool(execute, PoolStatus("chat@v2", time.time() + 3600, fleet="another"))
        eventually(lambda: share(store) == 10.0)  # no controller has both


def test_an_order_wakes_nobody_who_has_nothing_to_do(store: Store, url: str) -> None:
    told: list[list[Rollout]] = []
    with elected(url, told) as runner:
        eventually(lambda: told == [[]])
        runner.apply(())
        eventually(lambda: told == [[], []])
        runner.apply([RolloutOrder("x", "other", "a", "b", 0)])
        eventually(lambda: len(told) > 4)  # rounds


def test_a_gateway_without_the_versions_leaves_the_rollout_to_one_that_has_them(store: Store, url: str) -> None:
    lacking, having = Versions("chat@v2"), Versions()
    with elected(url, versions=lacking) as without:
        begun = begin(store, without)
        eventually(lambda: lacking.asked > 5)
        assert store.fleet.lease(LEASE) is None
        assert share(store) == 0.0
        with elected(url, versions=having) as other:
            other.apply([begun.order])
            eventually(lambda: share(store) == 10.0)


def test_a_leader_that_loses_the_versions_gives_the_lease_back(store: Store, url: str) -> None:
    losing, having = Versions(), Versions()
    with elected(url, versions=losing) as first:
        begun = begin(store, first)
        eventually(lambda: share(store) == 10.0)
        holder = store.fleet.lease(LEASE)
        assert holder is not None
        losing.missing = {"chat@v1", "chat@v2"}
        with elected(url, versions=having) as second:
            second.apply([begun.order])
            store.rollouts.give(begun.id, RolloutVerb.PROMOTE)
            eventually(lambda: share(store) == 100.0)
            found = store.fleet.lease(LEASE)
            assert found is not None
            assert found.holder not in ("", holder.holder)
    assert store.rollouts.get(begun.id).phase != "aborting"


def test_a_rollout_whose_versions_no_gateway_has_can_be_ended(store: Store, url: str) -> None:
    with elected(url, versions=Versions("chat@v1", "chat@v2")) as runner:
        begun = begin(store, runner)
        store.rollouts.give(begun.id, RolloutVerb.ABORT)
        eventually(lambda: store.rollouts.get(begun.id).is_over)


def test_a_rollout_that_cannot_be_run_is_in_no_others_way(store: Store, url: str) -> None:
    store.routes.declare([Declared("other", {"a": 100.0, "b": 0.0}, {"a": 0.0, "b": 0.0})])

    class Broken(Versions):
        def num_ready(self, model: str, version: str) -> int | None:
            if model == "other":
                raise ValueError("a bug")
            return super().num_ready(model, version)

    with elected(url, versions=Broken()) as runner:
        start_rollout(store, "other", "b")
        begin(store, runner)
        eventually(lambda: share(store) == 10.0)


def test_news_that_comes_while_the_thread_looks_for_some_is_not_lost(store: Store, url: str) -> None:
    class Woken(threading.Event):
        """`between` is called once, right after somebody has seen that the event is not set."""

        between: Callable[[], object] | None = None

        def is_set(self) -> bool:
            found, between = super().is_set(), self.between
            if between is not None and not found:
                self.between = None
                between()
            return found

    told: list[list[Rollout]] = []
    runner = ElectedRunner(open_store(url), lease_s=0.3, every_s=0.02)
    woken = runner._woken = Woken()
    runner.start(Versions(), told.append)
    begun = begin(store, runner)
    eventually(lambda: share(store) == 10.0)
    store.rollouts.give(begun.id, RolloutVerb.ABORT)
    eventually(lambda: told[-1] == [])  # it is over, as the thread is still to hear
    woken.between = lambda: runner.apply(())
    eventually(lambda: [one.id for one in told[-1]] == [begun.id])
    runner.close()


@pytest.mark.parametrize("error", [StoreUnavailable("it is away"), ValueError("a bug")])
def test_news_that_comes_while_the_store_is_away_is_heard_later(store: Store, url: str, error: Exception) -> None:
    class Away(RolloutBook):
        failures = 2

        def all(self, model: str | None = None) -> list[Rollout]:
            if self.failures:
                self.failures -= 1
                raise error
            return super().all(model)

    told: list[list[Rollout]] = []
    opened = open_store(url)
    opened.rollouts.__class__ = Away
    runner = ElectedRunner(opened, lease_s=0.3, every_s=0.02)
    runner.start(Versions(), told.append)
    eventually(lambda: told == [[]])
    runner.close()


def test_rollouts_that_take_long_cost_no_other_its_lease(store: Store, url: str) -> None:
    models = ["m1", "m2", "m3"]
    timer_s = 0.0

    class Slow(Versions):
        def num_ready(self, model: str, version: str) -> int | None:
            nonlocal timer_s
            timer_s += 0.75  # a look has two of them
            return 2

    store.routes.declare([Declared(model, {"v1": 100.0, "v2": 0.0}, {}) for model in models])
    for model in models:
        start_rollout(store, model, "v2")
    runner = ElectedRunner(open_store(url), lease_s=4.0, timer=lambda: timer_s)
    runner._versions = Slow()
    for _ in range(3):
        runner._step(has_news=True)
        assert all(turn.is_leading for turn in runner._turns.values())
    runner.close()
