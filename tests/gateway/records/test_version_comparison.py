from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.records.token_usage import TokenUsage
from penstock.gateway.records.version_comparison import Comparison

DAY_S = 86400.0
PAIR = {"v1": "m@v1", "v2": "m@v2"}


def since(comparison: Comparison, since_s: float) -> Any:
    return comparison.since(PAIR, since_s)


def test_counts_times_and_tokens_are_summed_from_a_time_on() -> None:
    comparison = Comparison(PAIR.values())
    comparison.answered("m@v1", 10.0, "ok", TokenUsage(100, 10, 50), 0.1, 1.0)
    comparison.answered("m@v1", 70.0, "failed", None, None, 9.0)
    comparison.answered("m@v1", 130.0, "ok", TokenUsage(5, 6), 0.3, 3.0)
    found = since(comparison, 0)["v1"]
    assert (found["requests"], found["errors"], found["outcomes"]) == (3, 1, {"ok": 2, "failed": 1})
    assert found["error_rate"] == pytest.approx(1 / 3, abs=1e-6)
    assert found["tokens"] == {"input": 105, "cached": 50, "output": 16}
    assert (found["ttft_s"]["mean"], found["total_s"]["mean"]) == (pytest.approx(0.2), pytest.approx(2.0))
    assert since(comparison, 65.0)["v1"]["requests"] == 2
    assert since(comparison, 500.0)["v1"]["requests"] == 0
    assert since(comparison, 0)["v2"]["total_s"] == {"mean": None, "p95": None}


def test_a_percentile_is_right_within_a_bin() -> None:
    comparison = Comparison(PAIR.values())
    for number in range(1, 1001):
        comparison.answered("m@v2", number / 10, "ok", None, number / 1000, number / 100)
    found = since(comparison, 0)["v2"]
    assert found["ttft_s"]["p95"] == pytest.approx(0.95, rel=0.06)
    assert found["total_s"]["p95"] == pytest.approx(9.5, rel=0.06)


def test_copies_are_told_apart() -> None:
    comparison = Comparison(PAIR.values())
    comparison.copied("m@v2", 1.0, "ok", TokenUsage(1, 2), None, 0.5)
    comparison.copied("m@v2", 1.0, "dropped", None, None, None)
    found = since(comparison, 0)
    assert "shadow" not in found["v1"]
    assert (found["v2"]["requests"], found["v2"]["shadow"]["outcomes"]) == (0, {"ok": 1, "dropped": 1})


def test_no_more_than_a_day_is_kept_and_only_of_versions() -> None:
    comparison = Comparison(PAIR.values())
    for minute in range(3 * 1440):
        comparison.answered("m@v1", 60.0 * minute, "ok", None, None, 0.1)
        comparison.answered("other", 60.0 * minute, "ok", None, None, 0.1)
    assert since(comparison, 0)["v1"]["requests"] == 1440
    assert "other" not in comparison
