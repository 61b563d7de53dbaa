from __future__ import annotations

from itertools import islice, pairwise
from random import Random
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workload.arrivals import Process, arrival_times


@settings(max_examples=20, deadline=None)
@given(
    process=st.sampled_from(["poisson", "gamma", "constant"]),
    rate=st.floats(0.01, 1000),
    burstiness=st.floats(0.2, 5),
    seed=st.integers(0, 5),
)
def test_arrivals_are_in_order_and_as_many_as_asked_for(
    process: Process, rate: float, burstiness: float, seed: int
) -> None:
    times = list(islice(arrival_times(process, rate, Random(seed), burstiness=burstiness), 10_000))
    assert times[0] == 0.0
    assert all(before <= after for before, after in pairwise(times))
    assert len(times) / times[-1] == pytest.approx(rate, rel=0.12)


@pytest.mark.parametrize(
    ("process", "burstiness", "expected"), [("poisson", 1, 1), ("gamma", 0.25, 2), ("gamma", 4, 0.5)]
)
def test_burstiness_is_the_shape_of_the_intervals(process: Process, burstiness: float, expected: float) -> None:
    """The deviation of the intervals over their mean is one over the root of it."""
    times = islice(arrival_times(process, 5, Random(3), burstiness=burstiness), 30_000)
    intervals = [after - before for before, after in pairwise(times)]
    assert stdev(intervals) / fmean(intervals) == pytest.approx(expected, rel=0.05)


def test_the_same_seed_gives_the_same_times() -> None:
    one, other = (list(islice(arrival_times("poisson", 5, Random("seed")), 50)) for _ in range(2))
    assert one == other
