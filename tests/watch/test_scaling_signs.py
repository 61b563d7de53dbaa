"""Alerts of a fleet that cannot scale as it should, on the virtual clock."""

from __future__ import annotations

import pytest

from penstock.watch.readings import PoolReading
from tests.watch.fleet import MODEL, Fleet


def fired(pool: PoolReading, seconds: int) -> set[tuple[str, str]]:
    fleet = Fleet(rate=0.0)
    fleet.pools = [pool]
    fleet.run(seconds)
    return fleet.fired()


def pool(**values: object) -> PoolReading:
    return PoolReading(**{"model": MODEL, "wanted": 1, "num_active": 1, "start_p95_s": 40.0, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, set()),
        ({"bound": "max"}, {("PoolAtBound", "ticket")}),
        ({"bound": "spend"}, {("PoolAtBound", "ticket")}),
        ({"bound": "min"}, set()),
        ({"oldest_start_s": 79.0}, set()),
        ({"oldest_start_s": 81.0}, {("ReplicaStartSlow", "ticket")}),
        ({"oldest_start_s": 59.0, "start_p95_s": 2.0}, set()),
        ({"failed_starts": 2}, set()),
        ({"failed_starts": 3, "failure": "no disk"}, {("ReplicaStartsFailing", "ticket")}),
        ({"failed_starts": 3, "num_active": 0}, {("ReplicaStartsFailing", "ticket"), ("ModelDown", "page")}),
        ({"failed_starts": 3, "num_active": 0, "wanted": 0}, {("ReplicaStartsFailing", "ticket")}),
        ({"reversals": 2}, set()),
        ({"reversals": 3}, {("ScalingFlaps", "ticket")}),
        ({"age_s": 29.0}, set()),
        ({"age_s": 31.0, "bound": "max", "reversals": 9}, {("FleetControllerDown", "page")}),
        ({"age_s": 1e6}, set()),
        ({"model": "another", "age_s": 31.0}, set()),
    ],
    ids=[
        "well",
        "at max",
        "at its spend",
        "at min",
        "start",
        "slow start",
        "fast start",
        "two failures",
        "three failures",
        "three failures, and none is left",
        "three failures, and none is wanted",
        "two reversals",
        "three reversals",
        "fresh",
        "no controller",
        "long gone",
        "not this gateway's",
    ],
)
def test_pool_raises_exactly_its_alert(values: dict[str, object], expected: set[tuple[str, str]]) -> None:
    assert fired(pool(**values), 130) == expected


def test_bound_must_last_and_a_failure_says_why() -> None:
    assert fired(pool(bound="max"), 110) == set()
    fleet = Fleet(rate=0.0)
    fleet.pools = [pool(failed_starts=4, failure="no disk")]
    (alert,) = fleet.run(2)
    assert alert.summary == f"{MODEL}: 4 starts in a row failed: no disk"
    fleet.pools = [pool()]
    assert [one.state for one in fleet.run(70)] == ["resolved"]
