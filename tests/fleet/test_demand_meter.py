"""Demand from gateways' counters."""

from __future__ import annotations

import pytest

from penstock.fleet.demand_meter import DemandMeter
from penstock.tenancy.fleet import PoolDemand


def row(gateway: str, at: float, arrivals: int, **more: float) -> PoolDemand:
    return PoolDemand(gateway, "p", at, arrivals=arrivals, finished=arrivals, **more)  # type: ignore[arg-type]


def test_rate_is_what_the_counters_of_all_gateways_grew_by() -> None:
    meter = DemandMeter()
    for second in range(31):
        meter.observe([row("a", second, 1000 + 2 * second), row("b", second, 3 * second)], second)
    assert meter.demand(30.0).arrivals_per_s == pytest.approx(5.0)


def test_gateway_that_starts_later_counts_from_zero() -> None:
    meter = DemandMeter()
    meter.observe([row("a", 0.0, 100)], 0.0)
    meter.observe([row("a", 1.0, 100), row("b", 1.0, 7)], 1.0)
    assert meter.demand(1.0).arrivals_per_s == pytest.approx(7.0)


def test_gateway_that_falls_silent_and_returns_is_not_counted_twice() -> None:
    meter = DemandMeter()
    meter.observe([row("a", 0.0, 0)], 0.0)
    meter.observe([row("a", 1.0, 10)], 1.0)
    meter.observe([], 2.0)
    meter.observe([row("a", 4.0, 12)], 4.0)
    assert meter.demand(4.0).arrivals_per_s == pytest.approx(12 / 4)


def test_mix_is_the_mean_request_of_the_last_minutes() -> None:
    meter = DemandMeter()
    meter.observe([row("a", 0.0, 0)], 0.0)
    meter.observe([row("a", 10.0, 4, prompt_tokens=400, cached_tokens=100, output_tokens=80)], 10.0)
    demand = meter.demand(10.0)
    assert (demand.prompt_tokens, demand.output_tokens, demand.cached_share) == (100.0, 20.0, 0.25)


def test_busiest_second_is_told_beside_the_mean() -> None:
    meter = DemandMeter()
    arrivals = 0
    for second in range(16):
        arrivals += 20 if second == 13 else 1
        meter.observe([row("a", second, arrivals)], second)
    demand = meter.demand(15.0)
    assert demand.peak_arrivals_per_s == 20.0
    assert demand.arrivals_per_s == pytest.approx(34 / 15)


def test_dispersion_is_that_of_seconds_and_a_single_burst_is_no_noise() -> None:
    meter, arrivals = DemandMeter(), 0
    for second in range(60):
        arrivals += 9000 if second == 30 else 80 if second % 2 else 120
        meter.observe([row("a", second, arrivals), row("b", second, 100 * second)], second)
    assert meter.demand(60.0).dispersion == pytest.approx(20**2 / 200, rel=0.1)


def test_rows_that_come_a_round_late_are_no_noise() -> None:
    meter = DemandMeter()
    for second in range(60):
        shown = second - (second % 7 == 0)
        meter.observe([row("a", shown, 100 * shown), row("b", second, 100 * second)], second)
    assert meter.demand(60.0).dispersion == pytest.approx(0.0, abs=0.1)


def test_mix_is_that_of_the_last_requests_where_there_are_many() -> None:
    meter = DemandMeter()
    tokens = 0
    for second in range(100):
        tokens += 1000 * (100 if second < 70 else 300)
        meter.observe([row("a", second, 1000 * (second + 1), prompt_tokens=tokens)], second)
    assert meter.demand(99.0).prompt_tokens == 300


def test_nothing_observed_is_no_demand() -> None:
    assert DemandMeter().demand(0.0).arrivals_per_s == 0.0
