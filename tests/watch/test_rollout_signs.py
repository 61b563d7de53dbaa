"""Alerts of rollouts, on the virtual clock."""

from __future__ import annotations

import pytest

from penstock.watch.readings import RolloutReading
from tests.watch.fleet import Fleet


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, set()),
        ({"phase": "aborted", "age_s": 10.0}, {("RolloutAborted", "ticket")}),
        ({"phase": "aborting", "age_s": 0.0, "limit_s": 1800.0}, {("RolloutAborted", "ticket")}),
        ({"phase": "aborted", "is_ordered": True}, set()),
        ({"phase": "aborted", "age_s": 3601.0}, set()),
        ({"phase": "paused", "age_s": 1700.0, "limit_s": 1800.0}, set()),
        ({"phase": "paused", "age_s": 1801.0, "limit_s": 1800.0}, {("RolloutStuck", "ticket")}),
        ({"phase": "holding", "age_s": 1e6}, set()),
    ],
    ids=["well", "aborted", "aborting", "ordered", "long ago", "paused", "paused for long", "holding"],
)
def test_rollout_raises_exactly_its_alert(values: dict[str, object], expected: set[tuple[str, str]]) -> None:
    fleet = Fleet(rate=0.0)
    fleet.rollouts = [RolloutReading(**{"model": "chat", "id": "a", "new": "v2", "phase": "watching", **values})]  # type: ignore[arg-type]
    fleet.run(5)
    assert fleet.fired() == expected


def test_an_alert_says_which_version_and_why_and_ends_with_the_next_rollout() -> None:
    fleet = Fleet(rate=0.0)
    fleet.rollouts = [RolloutReading(model="chat", id="a", new="v2", phase="aborted", reason="TPOT 1.2 x of v1's")]
    (alert,) = fleet.run(2)
    assert alert.summary == "chat: the rollout of v2 was aborted: TPOT 1.2 x of v1's"
    fleet.rollouts = []
    assert [one.state for one in fleet.run(70)] == ["resolved"]
