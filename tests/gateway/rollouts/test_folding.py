"""Observations in blocks: cells, strata, tenants, and blocks that add up."""

from __future__ import annotations

from math import log
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from penstock.core.rollout import BLOCK_S, Arm, Block, Cell, CellKey, Metric, RolloutOrder
from penstock.gateway.rollouts.folding import MAX_TENANTS, BlockFolder, LargestTenants, merged
from penstock.gateway.rollouts.observation import Observation, Timing

ORDER = RolloutOrder("r", "m", "v1", "v2", step=3)
GOOD = ((Metric.ERRORS, 0.0), (Metric.REFUSALS, 0.0))
TIMING = Timing(2, 100, 11, 0.1, 1.1, 0.5)


def seen(at: float = 100.0, **values: Any) -> Observation:
    return Observation(**({"order": ORDER, "arm": Arm.NEW, "at": at, "tenant": "acme", "values": GOOD} | values))


def cells(blocks: list[Block]) -> dict[CellKey, Cell]:
    return dict(merged(blocks)[0].cells)


def test_a_request_is_in_the_sum_in_its_stratum_and_with_its_tenant() -> None:
    folder = BlockFolder("g")
    folder.add(seen(timing=TIMING))
    (block,) = folder.close(105.0)
    assert (block.rollout, block.step, block.gateway, block.at, block.seconds) == ("r", 3, "g", 100.0, BLOCK_S)
    found = dict(block.cells)
    assert found[CellKey(Metric.ERRORS, Arm.NEW)] == Cell(1, 0.0, 0.0)
    assert found[CellKey(Metric.ERRORS, Arm.NEW, "", "acme")].count == 1
    whole = found[CellKey(Metric.TPOT, Arm.NEW)]
    assert whole.total == pytest.approx(log(0.1))
    assert whole.quantile(0.5) == pytest.approx(0.1, rel=0.02)
    assert found[CellKey(Metric.TPOT, Arm.NEW, "f2")] == whole
    assert found[CellKey(Metric.TPOT, Arm.NEW, "f2", "acme")].count == 1
    assert CellKey(Metric.TPOT, Arm.NEW, "", "acme") not in found
    assert CellKey(Metric.TTFT, Arm.NEW, "p7f2") in found
    assert CellKey(Metric.COST, Arm.NEW) not in found  # it has no price
    assert {key.tenant for key in found if key.metric is Metric.DEVICE_TIME} == {""}
    assert msgspec.json.decode(msgspec.json.encode(block), type=Block) == block


def test_cost_is_of_devices_where_they_have_a_price_and_else_of_the_pool() -> None:
    by_device, by_tokens = TIMING._replace(hour_price=7200.0, cost=9.0), TIMING._replace(cost=22.0)
    assert dict(by_device.times())[Metric.COST] == pytest.approx(0.5 * 2.0 / 11)
    assert dict(by_tokens.times())[Metric.COST] == pytest.approx(2.0)


def test_what_takes_no_time_or_makes_no_token_has_none() -> None:
    nothing = Timing(0, 0, 0, 0.0, 0.0, 0.0)
    assert list(nothing.times()) == []
    assert {metric for metric, _ in Timing(0, 8, 1, 0.1, 0.1).times()} == {
        Metric.TTFT,
        Metric.LATENCY,
        Metric.OUTPUT_TOKENS,
    }


def test_blocks_end_with_their_seconds_and_steps_are_not_mixed() -> None:
    folder = BlockFolder("g")
    for at in (100.0, 104.9, 105.0):
        folder.add(seen(at))
    folder.add(seen(104.0, order=replace(ORDER, step=4)))
    assert [(block.at, block.step) for block in folder.close(109.0)] == [(100.0, 3), (100.0, 4)]
    assert [(block.at, block.seconds) for block in folder.close_all(107.0)] == [(105.0, 2.0)]


def test_a_wall_clock_that_goes_back_opens_no_block_again() -> None:
    folder = BlockFolder("g")
    folder.add(seen(104.0))
    first = folder.close(105.0)
    folder.add(seen(90.0))
    second = folder.close(110.0)
    assert [block.at for block in first + second] == [100.0, 105.0]


def test_blocks_of_two_gateways_and_merged_ones_add_up() -> None:
    blocks, alone = [], BlockFolder("both")
    for name in ("g1", "g2"):
        folder = BlockFolder(name)
        for number in range(40):
            one = seen(100.0 + number, timing=TIMING._replace(total_s=1.0 + number))
            folder.add(one), alone.add(one)
        blocks += folder.close_all(150.0)
    expected = cells(alone.close_all(150.0))
    found = cells(blocks)
    assert found.keys() == expected.keys()
    for key, cell in expected.items():
        assert (found[key].count, found[key].bins) == (cell.count, cell.bins)
        assert found[key].total == pytest.approx(cell.total)
        assert found[key].squares == pytest.approx(cell.squares)
    (block,) = merged(blocks)
    assert (block.at, block.seconds) == (135.0, 80.0)
    assert sum(cell.count for _, cell in blocks[0].cells) < sum(cell.count for _, cell in block.cells)


def test_only_the_largest_tenants_have_cells_of_their_own() -> None:
    folder = BlockFolder("g")
    for number in range(3 * MAX_TENANTS):
        folder.add(seen(tenant=f"t{number}"))
    key, found = CellKey(Metric.ERRORS, Arm.NEW), dict(folder.close(105.0)[0].cells)
    assert found[key].count == 3 * MAX_TENANTS
    assert len({key.tenant for key in found} - {""}) == MAX_TENANTS
    for _ in range(5):
        folder.add(seen(106.0, tenant="late"))
    assert "late" not in {key.tenant for key, _ in folder.close(110.0)[0].cells}
    folder.add(seen(111.0, tenant="late"))
    assert "late" in {key.tenant for key, _ in folder.close(115.0)[0].cells}


def test_any_number_of_tenants_is_counted_within_bounds() -> None:
    tenants = LargestTenants(2)
    for number in range(10_000):
        tenants.is_named(f"t{number}"), tenants.is_named("large")
    tenants.choose_again()
    assert tenants.is_named("large")
    assert len(tenants._counts) < 5000


def test_a_corrected_value_waits_for_a_cell_that_counts() -> None:
    folder = BlockFolder("g")
    bad = ((Metric.COMPLAINTS, 1.0),)
    folder.add(seen(100.0, values=bad))
    first = folder.close(105.0)
    folder.correct(ORDER, Arm.NEW, Metric.COMPLAINTS, "acme", 1.0, 0.0)
    assert folder.close(110.0) == []
    folder.add(seen(111.0, values=bad))
    total = cells(first + folder.close(115.0))[CellKey(Metric.COMPLAINTS, Arm.NEW)]
    assert total == Cell(2, 1.0, 1.0)


def test_a_correction_stays_in_the_step_of_what_it_corrects() -> None:
    folder, later = BlockFolder("g"), replace(ORDER, step=ORDER.step + 1)
    folder.add(seen(100.0, values=((Metric.COMPLAINTS, 1.0),)))
    folder.close(105.0)
    folder.correct(ORDER, Arm.NEW, Metric.COMPLAINTS, "acme", 1.0, 0.5)
    folder.add(seen(106.0, values=((Metric.COMPLAINTS, 0.0),), order=later))
    assert cells(folder.close(110.0))[CellKey(Metric.COMPLAINTS, Arm.NEW)] == Cell(1, 0.0, 0.0)
    assert folder._corrections
    folder.keep({later.id: later})
    assert not folder._corrections


def test_a_wall_clock_that_goes_back_keeps_no_block_waiting() -> None:
    folder = BlockFolder("g")
    folder.add(seen(1000.0))
    found = folder.close(1005.0)
    for at in (405.0, 410.0, 415.0, 420.0, 425.0):
        folder.add(seen(at))
        found += folder.close(at + 5.0)
        assert folder.close(at + 5.0) == []  # to be asked once more takes it no farther
    assert [block.at for block in found] == [1000.0, 1005.0, 1010.0]
    assert cells(found)[CellKey(Metric.ERRORS, Arm.NEW)].count == 6
    folder.add(seen(1030.0))
    assert [block.at for block in folder.close(1035.0)] == [1030.0]


def test_blocks_catch_up_with_a_wall_clock_that_was_set_back() -> None:
    folder = BlockFolder("g")
    folder.add(seen(1000.0))
    found = folder.close(1005.0)
    for at in (*range(905, 1000, 5), *range(950, 1305, 5)):  # it is set back twice
        folder.add(seen(float(at)))
        found += folder.close(at + 5.0)
    places = [block.at for block in found]
    assert places == sorted(set(places))
    assert cells(found)[CellKey(Metric.ERRORS, Arm.NEW)].count == 91
    assert places[-1] == 1300.0
