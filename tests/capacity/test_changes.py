from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.capacity.changes import Price, alternatives, changes, path
from penstock.capacity.demand import Demand, Target
from penstock.capacity.hardware import hardware
from penstock.capacity.plan import Case, Setup, best
from penstock.capacity.shapes import SHAPES
from penstock.core.parallelism import Parallelism

TABLE = hardware()
CASE = Case(SHAPES["llama70b"], Demand(600.0, ((512, 256),), 0.3, Target(0.5, 0.1)), TABLE)
TODAY = Setup("h100", parallelism=Parallelism(8), uses_prefix_cache=False)
BILL = 228 * 3.00 * 730


def test_half_a_million_a_month_is_halved_step_by_step() -> None:
    steps = path(CASE, TODAY, BILL, BILL / 2, gpus=["h100"])
    costs = [BILL, *(step.layout.cost_per_month for step in steps)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] <= BILL / 2 < costs[-2]  # and not a step more than it takes
    assert all(step.layout.setup.gpu == "h100" for step in steps)
    assert [step.change.price for step in steps] == sorted(step.change.price for step in steps)


def test_latency_is_given_up_last() -> None:
    hurried = replace(CASE, demand=replace(CASE.demand, target=Target(0.15, 0.1)))
    steps = path(hurried, TODAY, 4 * BILL, 1.0, gpus=["h100"])
    prices = [step.change.price for step in steps]
    assert prices == sorted(prices)
    assert Price.LATENCY in prices  # the goal is out of reach, so all that helps is tried


def test_a_fleet_larger_than_its_load_is_cut_first() -> None:
    idle = replace(CASE, demand=replace(CASE.demand, rate=100.0))
    first, *_ = path(idle, TODAY, BILL, BILL / 2, gpus=["h100"])
    assert first.change.name == "as many replicas as the load needs"


def test_every_alternative_is_priced_and_ranked() -> None:
    found = alternatives(CASE, Setup("h200"))
    costs = [each.layout.cost_per_month for each in found]
    assert costs == sorted(costs)
    names = " ".join(each.change.name for each in found)
    for word in ("on h100", "weights fp8", "KV fp8", "TTFT", "batch", "without a prefix cache"):
        assert word in names


@pytest.mark.parametrize("price", [Price.QUALITY, Price.HARDWARE, Price.LATENCY])
def test_a_change_alters_only_what_it_says(price: Price) -> None:
    for change in changes(CASE, Setup("h200")):
        if change.price is price:
            assert (change.setup.formats != Setup("h200").formats) == (price is Price.QUALITY)
            assert (change.setup.gpu != "h200") == (price is Price.HARDWARE)
            assert (change.demand != CASE.demand) == (price is Price.LATENCY)


def test_an_unused_prefix_cache_is_worth_something() -> None:
    without, with_it = (best(CASE, Setup("h200", uses_prefix_cache=used)) for used in (False, True))
    assert without is not None
    assert with_it is not None
    assert with_it.cost_per_month < without.cost_per_month
