"""Speeds tell replicas apart only where they differ for good."""

from __future__ import annotations

from penstock.health.speeds import Speeds


def test_who_has_measured_nothing_counts_as_fast_as_those_who_have() -> None:
    speeds = Speeds()
    assert speeds.seen("a", None, 2000.0) == 2000.0
    assert speeds.seen("a", 9000.0, 2000.0) == 9000.0
    assert speeds.seen("b", None, 2000.0) == 9000.0


def test_small_differences_are_none_and_large_ones_stand() -> None:
    speeds = Speeds()
    for name, measured in (("a", 9000.0), ("b", 10_000.0), ("c", 11_000.0)):
        speeds.seen(name, measured, 0.0)
    assert {speeds.seen(name, measured, 0.0) for name, measured in (("a", 9000.0), ("c", 11_000.0))} == {10_000.0}
    assert speeds.seen("slow", 3000.0, 0.0) == 3000.0
    speeds.forget("slow")
    assert speeds.seen("a", 9000.0, 0.0) == 10_000.0
