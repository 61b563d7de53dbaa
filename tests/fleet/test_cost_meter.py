"""Replica-seconds and money by state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.cost_meter import CostMeter
from penstock.tenancy.fleet import FleetReplica

STATES = ("starting", "active", "standby", "parked", "draining")


def replica(name: str, state: str, created_at: float = 0.0, price: float = 3.6) -> FleetReplica:
    return FleetReplica(name, "p", state, created_at, price_per_hour=price, created_at=created_at)


def test_every_state_is_paid_for_from_the_replicas_beginning() -> None:
    meter = CostMeter()
    meter.observe([], 100.0)
    meter.observe([replica("a", "starting", 105.0)], 110.0)
    meter.observe([replica("a", "active", 105.0), replica("b", "parked", 110.0, price=0.25)], 130.0)
    seconds, costs = meter.take()
    assert seconds == {"starting": 5.0, "active": 20.0, "parked": 20.0}
    assert costs == {
        "starting": pytest.approx(0.005),
        "active": pytest.approx(0.02),
        "parked": pytest.approx(0.25 * 20 / 3600),
    }
    assert meter.take() == ({}, {})


def test_time_without_a_controller_is_paid_for() -> None:
    first, second = CostMeter(), CostMeter()
    first.observe([replica("a", "active")], 100.0)
    first.observe([replica("a", "active")], 110.0)
    second.restore(first.encode())
    second.observe([replica("a", "active")], 400.0)
    assert second.take().seconds == {"active": 300.0}


@given(st.lists(st.lists(st.sampled_from(STATES), max_size=4), min_size=2, max_size=20), st.integers(1, 10))
def test_seconds_are_those_that_passed_whatever_the_states(rounds: list[list[str]], step_s: int) -> None:
    meter = CostMeter()
    for number, states in enumerate(rounds):
        meter.observe([replica(str(index), state) for index, state in enumerate(states)], number * float(step_s))
    expected = step_s * sum(map(len, rounds[1:]))
    assert sum(meter.take().seconds.values()) == pytest.approx(expected)
