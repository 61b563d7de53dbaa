from __future__ import annotations

import pytest

from penstock.fleet.policy.observation import Demand
from penstock.fleet.policy.thresholds import needed_by_thresholds


@pytest.mark.parametrize(
    ("seen", "active", "needed"),
    [
        (Demand(waiting=11), 2, 3),
        (Demand(waiting=9), 2, 2),
        (Demand(waiting=2), 2, 1),
        (Demand(waiting=0), 1, 1),
        (Demand(waiting=11), 50, 55),
    ],
)
def test_one_more_above_and_one_less_where_it_would_stay_below(seen: Demand, active: int, needed: int) -> None:
    assert needed_by_thresholds({"waiting": 10.0}, seen, active)[0] == needed


def test_any_signal_is_enough_to_grow_and_all_are_needed_to_shrink() -> None:
    thresholds = {"kv_usage": 0.8, "wait_s": 1.0}
    assert needed_by_thresholds(thresholds, Demand(kv_usage=0.9), 4)[0] == 5  # type: ignore[arg-type]
    assert needed_by_thresholds(thresholds, Demand(kv_usage=0.7), 4)[0] == 4  # type: ignore[arg-type]
    assert needed_by_thresholds(thresholds, Demand(kv_usage=0.2), 4)[0] == 3  # type: ignore[arg-type]


def test_headroom_is_a_threshold_from_below() -> None:
    assert needed_by_thresholds({"memory_headroom": 0.1}, Demand(memory_headroom=0.05), 2)[0] == 3
    assert needed_by_thresholds({"memory_headroom": 0.1}, Demand(memory_headroom=0.9), 2)[0] == 1
