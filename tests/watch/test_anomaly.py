from __future__ import annotations

import pytest
from tools.watch.week import FAULTS, Fault, minutes, watch_week

from penstock.watch.anomaly import Baseline
from penstock.watch.deviations import Deviations
from penstock.watch.samples import Reading, Signal


def fed(signal: Signal, values: list[float], requests: int = 100) -> list[bool]:
    baseline, found = Baseline(signal), []
    for minute, value in enumerate(values):
        baseline.feed(Reading(value, requests), 60.0 * minute)
        found.append(baseline.is_anomalous)
    return found


def test_speed_that_halves_is_an_anomaly_within_minutes_and_over_when_it_returns() -> None:
    found = fed(Signal.SPEED, [50.0] * 300 + [25.0] * 60 + [50.0] * 30)
    assert not any(found[:300])
    assert found.index(True) <= 306
    assert not found[-1]


def test_the_better_is_no_anomaly() -> None:
    assert not any(fed(Signal.SPEED, [50.0] * 300 + [100.0] * 60))
    assert not any(fed(Signal.TTFT, [0.5] * 300 + [0.1] * 60))


def test_one_bad_minute_is_none() -> None:
    assert not any(fed(Signal.TTFT, [0.2] * 300 + [5.0, 5.0] + [0.2] * 60))


def test_few_requests_vary_more_and_need_more_to_say() -> None:
    assert any(fed(Signal.ANSWER, [200.0] * 300 + [100.0] * 30, requests=100))
    assert not any(fed(Signal.ANSWER, [200.0] * 300 + [100.0] * 30, requests=1))


def test_what_has_been_so_for_a_day_is_how_it_is() -> None:
    found = fed(Signal.SPEED, [50.0] * 300 + [25.0] * (1440 + 300))
    assert found[310]
    assert not found[-1]


def test_load_says_nothing_before_a_week_is_known() -> None:
    assert not any(fed(Signal.TOKENS, [1000.0] * 2000 + [10.0] * 200))


@pytest.mark.parametrize(("hit", "named"), [(None, ""), (1, "r1")])
def test_a_model_is_named_where_most_of_its_replicas_are_wrong(hit: int | None, named: str) -> None:
    deviations = Deviations("m", 60.0)
    fault = Fault("half speed", 300, 60, hit, speed=0.5)
    for minute in minutes(1, faults=(fault,), weeks=1, count=330):
        deviations.period(minute.samples, minute.at_s)
    assert [(replica, signal) for replica, signal, _ in deviations.anomalies()] == [(named, Signal.SPEED)]


@pytest.mark.slow
def test_a_week_with_faults_is_understood() -> None:
    score = watch_week(minutes(seed=3))
    late = [fault.name for fault in FAULTS if not fault.is_subtle and (score.found[fault.name] or 999) > 15]
    assert late == []
    assert len(score.false_alarms) <= 1
