"""Rollouts between real processes, by the drill's scenarios, with differences so large that noise cannot hide them.

The new version's steps take as long as its delay says, whatever else the cores do. How small a difference is found, and
how soon, is for `make drill-rollout` and for the simulation.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tools.drills import rollout
from tools.drills.fleet_stand import PATIENCE_S, RealFleet, real_fleet
from tools.drills.fleet_stand import POOL as MODEL

from penstock.rollout.desk import find, start_rollout, story_of
from penstock.tenancy.rollouts import RolloutVerb
from tests.cli.test_fleet_version_pools import ask
from tests.waiting import eventually

pytestmark = pytest.mark.slow
MINUTES = pytest.mark.drill  # most of which rollouts wait for requests


@MINUTES
async def test_a_version_that_is_slower_is_found_before_a_client_is_served_by_it(tmp_path: Path) -> None:
    with rollout.paced(tmp_path, slower=3.0) as place:
        report = await rollout.of_slower(place)
    assert report.phase == "aborted", report.story
    assert report.served.by_new == 0
    assert report.served.by_old > 0
    assert (report.served.failed, report.served.wrong) == (0, [])
    assert any(word in report.reason for word in ("TPOT", "latency", "TTFT"))


async def test_a_version_that_fails_is_aborted_after_a_few_requests(tmp_path: Path) -> None:
    with rollout.failing(tmp_path) as place:
        report = await rollout.of_failing(place)
        store = place.store
        assert store.routes.show("chat").weights == {"v1": 100.0, "v2": 0.0}
    assert report.phase == "aborted", report.story
    assert "errors" in report.reason
    assert report.served.wrong == []


@MINUTES
async def test_an_equal_version_is_promoted_though_each_gateway_is_killed_once(tmp_path: Path) -> None:
    shadow = {"shadow": 1.0, "min_s": 5, "min_requests": 20, "max_s": 3600}
    with rollout.paced(tmp_path, num_gateways=2) as place:
        report = await rollout.of_equal(place, shadow)
        assert place.store.routes.show("chat").weights == {"v1": 0.0, "v2": 100.0}
    assert report.phase == "promoted", report.story
    assert (report.served.failed, report.served.wrong) == (0, [])
    assert report.served.by_new > 0


def add_idle_pool(fleet: RealFleet, name: str) -> None:
    """The same as the fleet's first, but that it has no replica as long as nobody asks."""
    document = json.loads(fleet.config.read_bytes())
    document["pools"][name] = {**document["pools"][MODEL], "min": 0}
    fleet.config.write_text(json.dumps(document))


def test_a_controller_that_is_killed_in_a_rollout_is_followed_by_another(tmp_path: Path, tiny_model: Path) -> None:
    """Both pools are the fleet's: the new one is started from nothing for its share, and the old one is there for the
    way back."""
    plan = {"steps": [{"share": 0.5, "min_s": 0, "min_requests": 0}, {"share": 1.0, "min_s": 0, "min_requests": 0}]}
    more = {"gates": rollout.WIDE, "settle_s": 0, "hold_s": 3600}
    with real_fleet(tmp_path, tiny_model, min=1, max=1) as fleet:
        add_idle_pool(fleet, f"{MODEL}@v2")
        first = fleet.start_controller()
        eventually(lambda: ask(fleet, MODEL)[0], lambda status: status == 200, within_s=PATIENCE_S)
        eventually(lambda: [one.declared.name for one in fleet.store.routes.all()], lambda names: MODEL in names)
        begun = start_rollout(fleet.store, MODEL, "v2", plan=plan | more)
        book = fleet.store.rollouts

        def pools() -> set[str]:
            return {one.pool for one in fleet.replicas().values() if one.state == "active"}

        eventually(fleet.replicas, lambda found: any(one.pool == f"{MODEL}@v2" for one in found.values()))
        second = fleet.start_controller()
        first.send_signal(signal.SIGKILL)
        first.wait(60)
        eventually(lambda: find(book, begun.id).phase, lambda phase: phase == "holding", within_s=PATIENCE_S)
        assert second.poll() is None
        assert fleet.store.routes.show(MODEL).weights == {"base": 0.0, "v2": 100.0}
        assert pools() == {MODEL, f"{MODEL}@v2"}
        assert [one.what for one in story_of(book, begun.id)].count("started") == 1
        book.give(begun.id, RolloutVerb.ABORT)
        assert fleet.store.routes.show(MODEL).weights == {"base": 100.0, "v2": 0.0}
        eventually(lambda: find(book, begun.id).phase, lambda phase: phase == "aborted", within_s=PATIENCE_S)
        assert MODEL in pools()
