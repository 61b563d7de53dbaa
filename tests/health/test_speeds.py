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
    for report in range(500):
        speeds.seen("slow", 3000.0 + report % 2, 0.0)
    assert speeds.seen("slow", 3000.0, 0.0) < 4000.0
    speeds.forget("slow")
    assert speeds.seen("a", 9000.0, 0.0) == 10_000.0


def test_a_replica_is_not_slow_for_the_prompts_that_it_has_now() -> None:
    """Long prompts, and those beside many answers, are measured at a third of the speed on the same device."""
    speeds = Speeds()
    for report in range(200):
        for name, phase in (("a", 0), ("b", 1)):
            speeds.seen(name, 12_000.0 + report if (report // 20 + phase) % 2 else 36_000.0 + report, 0.0)
    last = (("a", 12_000.0), ("b", 36_000.0))
    for name, measured in last:
        speeds.seen(name, measured, 0.0)
    assert len({speeds.seen(name, measured, 0.0) for name, measured in last}) == 1


def test_a_replica_that_is_slower_for_long_counts_as_that_and_one_that_throttles_at_once() -> None:
    speeds = Speeds()
    for report in range(200):
        for name, speed in (("a", 20_000.0), ("b", 20_000.0), ("slow", 8000.0)):
            speeds.seen(name, speed + report % 7, 0.0)
    assert speeds.seen("slow", 8000.0, 0.0) < 10_000.0
    assert speeds.seen("a", 2000.0, 0.0) == 2000.0


def test_a_replica_is_not_slow_for_its_first_short_prompts() -> None:
    """At low load nobody would send it another prompt, by which it could show that it is not."""
    speeds = Speeds()
    for report in range(200):
        speeds.seen("a", 20_000.0 + report, 0.0)
    assert speeds.seen("b", 1000.0, 0.0) == speeds.seen("a", 20_199.0, 0.0)
