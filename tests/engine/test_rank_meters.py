from __future__ import annotations

import pytest

from penstock.core.measurements import EngineTotals
from penstock.core.ranks import RankFigures, RankReading, RankReads, RankUsage
from penstock.engine.rank_meters import RankMeters

READS = (RankReads(weight_bytes=4000, kv_token_bytes=10), RankReads(weight_bytes=2000, kv_token_bytes=10))


def reading(rank: int, steps: int, busy_s: float, communication_s: float | None) -> RankReading:
    return RankReading(rank, f"node {rank}", RankUsage(7, communication_s, busy_s=busy_s, num_steps=steps))


def test_a_ranks_shares_are_of_its_own_time_between_two_readings() -> None:
    """A stage that is done sooner moves its bytes in less time: 20 steps of 4,000 bytes and 50 tokens in 2 s."""
    meters = RankMeters()
    for rank in (1, 0):
        meters.take(reading(rank, 100, 30.0, 3.0), 100, EngineTotals(read_tokens=9000))
    assert [(one.mbu, one.communication) for one in meters.figures(READS, 200_000.0)] == [(None, None)] * 2
    meters.take(reading(0, 120, 32.0, 3.5), 120, EngineTotals(read_tokens=10_000))
    meters.take(reading(1, 120, 31.0, 3.1), 120, EngineTotals(read_tokens=10_000))
    first, second = meters.figures(READS, 200_000.0)
    assert (first.rank, first.node, first.memory_bytes) == (0, "node 0", 7)
    assert first.mbu == pytest.approx(20 * (4000 + 50 * 10) / 2.0 / 100_000)
    assert second.mbu == pytest.approx(20 * (2000 + 50 * 10) / 1.0 / 100_000)
    assert first.communication == pytest.approx(0.25)
    assert second.communication == pytest.approx(0.1)


def test_ranks_without_new_steps_keep_their_last_shares() -> None:
    meters = RankMeters()
    for steps, busy_s in ((0, 0.0), (10, 1.0), (10, 1.0)):
        meters.take(reading(0, steps, busy_s, busy_s / 2), steps, EngineTotals())
    (figures,) = meters.figures(READS[:1], 80_000.0)
    assert (figures.mbu, figures.communication) == (pytest.approx(0.5), pytest.approx(0.5))


def test_shares_that_nobody_can_know_are_none() -> None:
    meters = RankMeters()
    for steps in (0, 10):
        meters.take(reading(0, steps, float(steps), None), steps, EngineTotals())
    assert meters.figures(READS, None) == meters.figures((), 1.0) == (RankFigures(0, "node 0", memory_bytes=7),)
    meters.clear()
    assert not meters.readings
