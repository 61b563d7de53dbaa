"""Strata of rollouts: who is compared with whom."""

from __future__ import annotations

import pytest

from penstock.core.rollout import TIMES, Metric
from penstock.core.rollout_strata import bucket, stratum


def test_counts_that_differ_by_less_than_a_factor_of_two_are_mostly_alike() -> None:
    assert [bucket(count) for count in (-1, 0, 1, 2, 3, 4, 7, 8, 1 << 40)] == [0, 0, 1, 2, 2, 3, 3, 4, 20]


@pytest.mark.parametrize(
    ("metric", "moved_by"),
    [
        (Metric.TTFT, {"uncached_tokens", "in_flight"}),
        (Metric.TPOT, {"in_flight"}),
        (Metric.LATENCY, {"in_flight", "output_tokens"}),
        (Metric.DEVICE_TIME, {"uncached_tokens", "in_flight", "output_tokens"}),
        (Metric.OUTPUT_TOKENS, set()),
        (Metric.ERRORS, set()),
    ],
)
def test_a_metric_is_compared_among_requests_alike_in_what_moves_it(metric: Metric, moved_by: set[str]) -> None:
    base = {"uncached_tokens": 100, "in_flight": 1, "output_tokens": 20}
    moved = {name for name in base if stratum(metric, **(base | {name: 5000})) != stratum(metric, **base)}
    assert moved == moved_by


def test_whatever_is_no_time_has_no_strata() -> None:
    for metric in set(Metric) - TIMES:
        assert stratum(metric, uncached_tokens=5, in_flight=3, output_tokens=9) == ""
