"""Demand by the second has the means and the dispersion of its windows, and the same seed is the same demand."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.sim.fleet.curves import CURVES, SURGE_AT, curve
from penstock.sim.fleet.demand import Window, draw, from_history, read_demand
from penstock.tenancy.fleet import FleetSample

HEAD = "start_s,requests_per_s,dispersion,input_mean,output_mean\n"


@pytest.mark.parametrize("dispersion", [1.0, 5.0, 60.0])
def test_counts_have_the_dispersion_of_their_window(dispersion: float) -> None:
    drawn = draw("d", [Window(600, 50.0, dispersion, 900, 100)] * 40, seed=3)
    counts = drawn.arrivals.reshape(40, 600)
    assert (counts.sum(axis=1) == 30_000).all()
    measured = (counts.var(axis=1) / 50.0).mean()
    assert measured == pytest.approx(dispersion, rel=0.1)


def test_bursts_of_ten_seconds_have_the_dispersion_over_ten_seconds() -> None:
    drawn = draw("d", [Window(600, 50.0, 20.0, 900, 100)] * 40, seed=3, burst_s=10)
    tens = drawn.arrivals.reshape(40, 60, 10).sum(axis=2)
    assert (tens.var(axis=1) / 500.0).mean() == pytest.approx(20.0, rel=0.15)
    assert drawn.arrivals.var() / 50.0 < 5.0


def test_a_file_is_scaled_to_its_peak(tmp_path: Path) -> None:
    file = tmp_path / "d.csv"
    file.write_text(HEAD + "0,10,2,900,100\n60,40,3,500,200\n")
    drawn = read_demand(file, seed=1, peak=20.0)
    assert drawn.seconds == 120
    assert drawn.arrivals[:60].sum() == 300
    assert drawn.arrivals[60:].sum() == 1200
    assert drawn.output_tokens[0] == 100
    assert drawn.output_tokens[-1] == 200
    assert (drawn.arrivals == read_demand(file, seed=1, peak=20.0).arrivals).all()


@pytest.mark.parametrize("text", ["", HEAD, HEAD + "0,1,1,1,1\n", "a,b\n1,2\n3,4\n", HEAD + "0,1,1,1,1\n0,1,1,1,1\n"])
def test_what_is_no_demand_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "d.csv"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_demand(file, seed=1)


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_stays_near_its_peak(name: str) -> None:
    drawn = curve(name, seed=1, peak=20.0, days=0.5)
    minutes = drawn.arrivals.reshape(-1, 60).mean(axis=1)
    assert drawn.seconds == 43_200
    assert minutes.max() < 30.0
    assert (drawn.arrivals == curve(name, seed=1, peak=20.0, days=0.5).arrivals).all()


def test_a_surge_is_so_many_times_as_much_at_once() -> None:
    drawn = curve("surge", seed=1, peak=300.0, surge=3.0)
    assert drawn.surge_at == SURGE_AT
    before, after = (drawn.arrivals[SURGE_AT + a : SURGE_AT + b].mean() for a, b in ((-300, 0), (0, 300)))
    assert after / before == pytest.approx(3.0, rel=0.15)


def test_history_becomes_demand_with_its_gaps() -> None:
    samples = [
        FleetSample(at=60.0 * minute, pool="p", arrivals=300, prompt_tokens=100, cached_share=0.25, output_tokens=10)
        for minute in (1, 2, 10, 11)
    ]
    drawn = from_history(samples, seed=0, dispersion=1.0)
    assert drawn.seconds == 600
    assert drawn.begins_at == 60.0
    assert drawn.arrivals[60:480].sum() == 0
    assert drawn.arrivals[:60].sum() == drawn.arrivals[480:540].sum() == drawn.arrivals[540:].sum() == 300
    assert set(drawn.prompt_tokens) == {75.0}


def test_history_of_a_version_that_counted_no_arrivals_goes_by_its_rates() -> None:
    samples = [FleetSample(at=60.0 * minute, pool="p", arrivals_per_s=5.0) for minute in range(4)]
    assert from_history(samples, seed=0).arrivals.mean() == pytest.approx(5.0, rel=0.3)
