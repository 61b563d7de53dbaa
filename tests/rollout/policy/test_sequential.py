"""Confidence sequences: they cover the truth at all looks together, and narrow as they should."""

from __future__ import annotations

from math import sqrt
from random import Random

import pytest

from penstock.rollout.policy.sequential import MeanDifference, is_difference_excluded, share_difference

ALPHA = 0.05


def test_mean_intervals_cover_at_every_look() -> None:
    source, missed, runs = Random(1), 0, 120
    for _ in range(runs):
        test, is_missed = MeanDifference(), False
        for _ in range(150):
            weight = source.choice((1.0, 4.0, 30.0))
            test.add(0.1 + source.gauss(0.0, 1.0 / sqrt(weight)), weight, 0.0, 0.0)
            interval = test.interval(ALPHA)
            is_missed |= interval is not None and not interval.low <= 0.1 <= interval.high
        missed += is_missed
    assert missed / runs <= ALPHA


def test_noise_that_lasts_over_windows_makes_no_false_alarm() -> None:
    """What windows have in common is in no window's own spread: windows together show it."""
    source, missed, runs = Random(2), 0, 60
    for _ in range(runs):
        test, drift, is_missed = MeanDifference(), 0.0, False
        for _ in range(200):
            drift = 0.8 * drift + source.gauss(0.0, 0.1)
            test.add(drift + source.gauss(0.0, 0.1), 100.0, 100.0, 99.0)
            interval = test.interval(1e-3)
            is_missed |= interval is not None and not interval.low <= 0.0 <= interval.high
        missed += is_missed
    assert missed / runs <= 0.05


def test_mean_intervals_narrow_with_weight() -> None:
    source, test, widths = Random(3), MeanDifference(), []
    for count in range(1, 401):
        test.add(source.gauss(0.3, 1.0), 1.0, 0.0, 0.0)
        if count in (100, 400):
            interval = test.interval(1e-4)
            assert interval is not None
            widths.append(interval.high - interval.low)
    assert 1.5 < widths[0] / widths[1] < 3.0
    assert widths[1] < 2 * 6.0 / sqrt(400)


def test_few_windows_say_nothing() -> None:
    test = MeanDifference()
    assert test.interval(ALPHA) is None
    test.add(1.0, 5.0, 1.0, 4.0)
    assert test.interval(ALPHA) is None


def test_scores_that_never_differed_may_do_so_yet() -> None:
    test = MeanDifference(pseudo_squares=1.0)
    for _ in range(30):
        test.add(0.0, 1.0, 0.0, 1.0)
    interval = test.interval(1e-4)
    assert interval is not None
    assert interval.high > 0.1


def test_share_intervals_cover_at_every_look() -> None:
    source, missed, runs = Random(4), 0, 60
    for _ in range(runs):
        old, new, is_missed = [0.0, 0], [0.0, 0], False
        for _ in range(60):
            for arm, count in ((old, 20), (new, 5)):
                arm[0] += sum(source.random() < 0.03 for _ in range(count))
                arm[1] += count
            spans = [((old[0], int(old[1])), (new[0], int(new[1])))]
            is_missed |= is_difference_excluded(spans, 0.0, ALPHA)
        missed += is_missed
    assert missed / runs <= ALPHA


def test_shares_that_both_change_from_span_to_span_raise_no_alarm() -> None:
    """The new version has most of its requests in a bad hour, and the old one in a good one."""
    spans = [((10.0, 10_000), (0.0, 100)), ((20.0, 1000), (200.0, 10_000))]
    assert not is_difference_excluded(spans, 0.0, 1e-4)
    together = [((30.0, 11_000), (200.0, 10_100))]
    assert is_difference_excluded(together, 0.0, 1e-4)


def test_a_dozen_failures_in_a_row_say_enough() -> None:
    interval = share_difference([((0.0, 200), (12.0, 12))], 1e-4)
    assert interval.estimate == 1.0
    assert interval.low > 0.2


def test_half_a_percent_of_errors_is_found_in_thousands_of_requests() -> None:
    assert share_difference([((10.0, 20_000), (55.0, 10_000))], 1e-4).low > 0.001
    assert share_difference([((10.0, 20_000), (3.0, 500))], 1e-4).low < 0.0


def test_interval_has_the_estimate_inside_and_the_margins_test_agrees() -> None:
    spans = [((5.0, 1000), (30.0, 1000))]
    interval = share_difference(spans, 0.01)
    assert interval.low < interval.estimate < interval.high
    assert is_difference_excluded(spans, interval.low - 1e-4, 0.01)
    assert not is_difference_excluded(spans, interval.low + 1e-4, 0.01)
    assert is_difference_excluded(spans, interval.high + 1e-4, 0.01)


def test_nothing_seen_excludes_nothing() -> None:
    assert share_difference([((0.0, 0), (0.0, 0))], 0.01).low == -1.0
    assert share_difference([], 0.01).high == pytest.approx(1.0)
