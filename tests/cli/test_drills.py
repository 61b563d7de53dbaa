"""Short versions of the drills in tools/drills: real processes, attacked and counted from outside: `make drills`.

What they hold is tested without a clock, or without processes, elsewhere: streams in test_gateway and test_survival,
limits in tenancy/limits/test_shared, refusals and spikes in admission/test_drills.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.drills import limits, refusals, slow_clients, spike, survival
from tools.drills.stand import stand

pytestmark = [pytest.mark.slow, pytest.mark.drill]


async def test_three_hundred_streams_outlive_a_kill_a_hang_and_a_drain(tmp_path: Path) -> None:
    with stand(tmp_path) as place:
        report = await survival.run(place, 300, 700)
    assert report.wrong == []
    assert report.num_hit[0] == 300
    assert min(report.num_hit) > 100


@pytest.mark.parametrize("counting", ["shared", "redis-closed", "redis-open"])
async def test_four_gateways_count_together_though_one_is_killed(tmp_path: Path, counting: str) -> None:
    with stand(tmp_path) as place:
        report = await limits.run(place, counting, 24.0)
    assert report.wrong == []
    assert report.fullest <= 1
    assert report.share >= 0.95
    assert report.num_broken == 0
    assert report.freed_s <= 10.0
    assert report.lost_tokens == 0


async def test_who_is_told_when_to_come_back_is_let_in_then(tmp_path: Path) -> None:
    with stand(tmp_path, context=refusals.CONTEXT) as place:
        found = await refusals.drill(place, ["tokens", "requests", "concurrency"], 6.0, 0)
    assert [kept.kind for kept in found if not kept.is_good] == []


async def test_who_is_refused_for_load_is_mostly_let_in_when_told(tmp_path: Path) -> None:
    with stand(tmp_path, context=refusals.CONTEXT) as place:
        (kept,) = await refusals.drill(place, ["load"], 20.0, 240)
    assert kept.wrong == []
    assert kept.num_back > 20
    assert kept.share >= 0.9


async def test_in_a_spike_who_spikes_waits_and_the_others_do_not(tmp_path: Path) -> None:
    """A short one, on busy cores: how much the others' times change is for the drill."""
    with stand(tmp_path) as place:
        report = await spike.drill(place, seconds=2.5, rate=4.0, num_tenants=2, warm_s=0.5)
    assert report.before.wrong + report.during.wrong == []
    assert spike.p(0.95, report.during.spiking) > 3 * spike.p(0.95, report.during.others)


async def test_a_tenfold_spike_leaves_the_others_where_they_were(tmp_path: Path) -> None:
    """The drill holds it to 1.2; here other things run on the same cores."""
    with stand(tmp_path) as place:
        report = await spike.drill(place, seconds=8.0, rate=2.5, num_tenants=4)
    assert report.before.wrong + report.during.wrong == []
    assert report.ratio <= 1.5
    assert spike.p(0.95, report.during.spiking) > 10 * spike.p(0.95, report.during.others)


async def test_clients_that_do_not_read_hold_nobody_and_those_who_leave_are_cancelled(tmp_path: Path) -> None:
    with stand(tmp_path) as place:
        report = await slow_clients.drill(place, 200, 600)
    assert report.wrong == []
    assert report.cancelled_s <= 1.0
    assert report.dripping_s <= slow_clients.HEAD_TIMEOUT_S + 1.0
    assert max(report.gateway_bytes, report.replica_bytes) < slow_clients.MAX_BYTES
    assert report.during_ms < 20 * report.before_ms
