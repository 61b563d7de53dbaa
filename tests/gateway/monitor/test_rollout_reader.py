"""Rollouts of a real store, as metrics and as the watch reads them."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from penstock.gateway.monitor.rollout_reader import RolloutReader
from penstock.observe.registry import Registry
from penstock.rollout.desk import start_rollout
from penstock.rollout.policy.state import Phase
from penstock.rollout.runner import state_of
from penstock.tenancy.routes import Declared
from penstock.tenancy.store import open_store


def test_a_rollout_is_seen_by_phase_and_step_and_what_another_version_wrote_is_left_out(tmp_path: Path) -> None:
    exports: list[Registry] = []
    with open_store(f"sqlite:///{tmp_path / 'penstock.db'}") as store:
        store.routes.declare([Declared("chat", {"v1": 1.0, "v2": 0.0}, {})])
        begun = start_rollout(store, "chat", "v2")
        reader = RolloutReader(exports, lambda: begun.started_at + 60.0)
        reader.apply([])
        assert exports == []
        unreadable = replace(begun, id="x", model="other", state=Raw(b'{"plan": 1}'))
        reader.apply([begun, unreadable])
        text = exports[0].exposition().decode()
        assert 'penstock_rollout_phase{model="chat",phase="waiting"} 1' in text
        assert 'penstock_rollout_step{model="chat"} 1' in text
        assert "other" not in text
        (reading,) = reader.readings()
        assert (reading.new, reading.phase, reading.limit_s, round(reading.age_s)) == ("v2", "waiting", 1800.0, 60)
        state = replace(state_of(begun), phase=Phase.ABORTED, since=begun.started_at)
        aborted = replace(
            begun, state=Raw(msgspec.json.encode(state)), phase="aborted", is_over=True, ended_at=begun.started_at
        )
        reader.apply([aborted, replace(aborted, id="y", ended_at=begun.started_at - 7200.0)])
        text = exports[0].exposition().decode()
        assert 'penstock_rollouts_ended{model="chat",outcome="aborted"} 2' in text
        assert "penstock_rollout_step{" not in text
        assert [one.phase for one in reader.readings()] == ["aborted"]


def test_a_hold_that_does_not_end_is_beyond_its_limit(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'penstock.db'}") as store:
        store.routes.declare([Declared("chat", {"v1": 1.0, "v2": 0.0}, {})])
        begun = start_rollout(store, "chat", "v2")
        state = replace(state_of(begun), phase=Phase.HOLDING, since=1000.0, hold_until=4600.0)
        reader = RolloutReader([])
        reader.apply([replace(begun, state=Raw(msgspec.json.encode(state)), phase="holding")])
        assert [one.limit_s for one in reader.readings()] == [4200.0]
