from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.lag import GeneratorHealth
from penstock.bench.load import Result, Run
from penstock.bench.measurement import Measurement, measurement, summarize
from penstock.bench.spread import percentile

FLOATS = st.lists(st.floats(-1e6, 1e6), min_size=1)


def measured(run: Run, round_: int = 0) -> Measurement:
    return measurement("ours", "c8", round_, run, client_cpu=0.0, foreign_cpu=None)


def answer(ttft_s: float, tpot_s: float | None, output_tokens: int = 10) -> Result:
    last_s = ttft_s + (tpot_s or 0.0) * (output_tokens - 1)
    return Result(
        0,
        0,
        0.0,
        0.0,
        last_s,
        output_tokens,
        first_s=ttft_s,
        last_s=last_s,
        prompt_tokens=5,
        cached_tokens=4,
        output_tokens=output_tokens,
    )


def run(wall_s: float, results: list[Result]) -> Run:
    return Run(wall_s, wall_s, results, GeneratorHealth(0.0, None, None), len(results))


@given(FLOATS)
def test_the_fiftieth_percentile_is_the_median(values: list[float]) -> None:
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


@given(FLOATS, st.floats(0, 100))
def test_a_percentile_lies_within_the_values(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found is not None
    assert min(values) <= found <= max(values) or found == pytest.approx(min(values))


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 50) is None


def test_the_rate_is_all_output_over_the_whole_time() -> None:
    one = measured(run(4.0, [answer(1.0, 0.1), answer(3.0, 0.3)]))
    assert one.output_tok_s == 5.0
    assert (one.ttft_p50_s, one.tpot_p50_s) == pytest.approx((2.0, 0.2))
    assert (one.prompt_tokens, one.cached_tokens, one.output_tokens) == (10, 8, 20)


def test_a_run_without_answers_has_a_rate_of_zero_and_no_latencies() -> None:
    one = measured(run(4.0, [Result(0, 0, 0.0, 0.0, 1.0, 10, error="refused")]))
    assert (one.output_tok_s, one.ttft_p50_s, one.tpot_p50_s, one.failures) == (0.0, None, None, ["refused"])


def test_a_summary_is_the_middle_round_and_the_spread() -> None:
    rounds = [measured(run(wall_s, [answer(wall_s, None, 1)] * 10), n) for n, wall_s in enumerate((1.0, 5.0, 2.0))]
    summary = summarize(rounds)
    assert (summary.slowest_tok_s, summary.output_tok_s, summary.fastest_tok_s) == (2.0, 5.0, 10.0)
    assert (summary.ttft_p50_s, summary.tpot_p50_s) == (2.0, None)
