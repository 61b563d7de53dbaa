"""Durations are measured, and guessed by those of others until then."""

from __future__ import annotations

from penstock.fleet.durations import MeasuredDurations
from penstock.fleet.policy.observation import Durations


def test_what_was_not_measured_is_guessed_by_the_longest_of_the_peers() -> None:
    own, one, two = MeasuredDurations(), MeasuredDurations(), MeasuredDurations()
    own.peers = (one, two)
    assert own.p95() == Durations()
    one.add("start_s", 3.0)
    two.add("start_s", 8.0)
    assert own.p95().start_s == 8.0
    own.add("start_s", 1.0)
    assert own.p95().start_s == 1.0
