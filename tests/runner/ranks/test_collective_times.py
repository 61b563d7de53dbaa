from __future__ import annotations

import pytest

from penstock.runner.ranks.collective_times import CollectiveTimes


def test_sizes_between_two_that_were_measured_lie_between_their_times() -> None:
    times = CollectiveTimes((1000, 3000, 5000), (1.0, 2.0, 6.0))
    assert [times.of(size) for size in (1, 1000, 3000, 5000)] == [1.0, 1.0, 2.0, 6.0]
    assert times.of(2000) == pytest.approx(1.5)
    assert times.of(4500) == pytest.approx(5.0)
    assert times.of(10_000) == pytest.approx(12.0)


def test_nothing_takes_no_time_and_so_does_what_was_not_measured() -> None:
    assert CollectiveTimes((1000,), (1.0,)).of(0) == 0.0
    assert CollectiveTimes().of(1000) == 0.0
