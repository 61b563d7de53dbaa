from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.spread import Spread, percentile

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


@given(VALUES)
def test_a_spread_is_what_numpy_says(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread is not None
    expected = [float(np.mean(values)), *map(float, np.percentile(values, [50, 95, 99])), max(values)]
    assert [spread.mean, spread.p50, spread.p95, spread.p99, spread.most] == pytest.approx(expected, abs=1e-6)
    assert spread.count == len(values)


@given(VALUES, st.floats(0, 100), st.floats(0, 100))
def test_a_higher_percentile_is_not_lower(values: list[float], one: float, other: float) -> None:
    low, high = (percentile(values, percent) for percent in sorted((one, other)))
    assert low is not None
    assert high is not None
    assert low <= high + 1e-6


def test_nothing_has_no_spread() -> None:
    assert Spread.of([]) is None
