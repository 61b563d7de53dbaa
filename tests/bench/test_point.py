from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.lag import GeneratorHealth, doubts
from penstock.bench.load import Result, Run
from penstock.bench.objective import Objective
from penstock.bench.point import in_flight, make_point
from penstock.bench.spread import Spread
from penstock.core.errors import ConfigError

WELL = GeneratorHealth(0.1, None, None)


def answered(intended_s: float, ttft_s: float, tpot_s: float, num_tokens: int = 11) -> Result:
    first_s = intended_s + ttft_s
    last_s = first_s + tpot_s * (num_tokens - 1)
    return Result(
        0,
        0,
        intended_s,
        intended_s + 0.01,
        last_s,
        num_tokens,
        first_s=first_s,
        last_s=last_s,
        gaps=array("d", [tpot_s] * (num_tokens - 1)),
        prompt_tokens=20,
        cached_tokens=5,
        output_tokens=num_tokens,
    )


def failed(kind: str) -> Result:
    return Result(0, 0, 0.0, 0.0, 0.5, 11, error=kind, message=f"a {kind}")


def run(*results: Result, wall_s: float = 10.0) -> Run:
    return Run(wall_s, wall_s, list(results), WELL, len(results))


def test_figures_are_of_the_answers_and_rates_over_the_whole_time() -> None:
    point = make_point("c", 2, run(answered(0, 0.1, 0.02), answered(1, 0.3, 0.04), failed("http_429")), None)
    assert (point.num_requests, point.num_answers, point.errors) == (3, 2, {"http_429": 1})
    assert point.examples == {"http_429": "a http_429"}
    assert (point.requests_per_s, point.output_tokens_per_s, point.total_tokens_per_s) == (0.2, 2.2, 6.2)
    assert point.ttft is not None
    assert point.ttft_from_send is not None
    assert point.tpot is not None
    assert point.gap is not None
    assert point.e2e is not None
    assert (point.ttft.mean, point.ttft_from_send.mean) == pytest.approx((0.2, 0.19))
    assert (point.tpot.p50, point.gap.mean, point.gap.count) == pytest.approx((0.03, 0.03, 20))
    assert point.e2e.most == pytest.approx(0.7)
    assert (point.goodput_per_s, point.slo_share) == (None, None)


def test_goodput_counts_who_kept_all_of_the_slo_among_all_who_asked() -> None:
    results = [answered(0, 0.1, 0.02), answered(0, 0.1, 0.09), answered(0, 0.6, 0.02), failed("broken")]
    point = make_point("c", 2, run(*results), Objective.parse("ttft=0.5,tpot=50ms"))
    assert (point.goodput_per_s, point.slo_share) == (0.1, 0.25)


def test_a_single_token_cannot_miss_a_tpot() -> None:
    assert Objective.parse("tpot=1ms").is_kept(answered(0, 0.1, 0.0, num_tokens=1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ttft=0.5", Objective(ttft=0.5)), ("e2e=2s, tpot=50ms", Objective(tpot=0.05, e2e=2.0))],
)
def test_an_objective_is_in_seconds_or_has_its_unit(text: str, expected: Objective) -> None:
    assert Objective.parse(text) == expected


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=fast", "ttft=-1", "speed=1", "ttft=inf", "ttft=1,"])
def test_what_is_no_objective_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an objective"):
        Objective.parse(text)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=50))
def test_in_flight_is_never_negative_nor_more_than_all(spans: list[tuple[float, float]]) -> None:
    results = [Result(0, 0, start, start, start + length, 1) for start, length in spans]
    counted = in_flight(results, 10.0, samples=20)
    assert len(counted) == 20
    assert all(0 <= number <= len(spans) for number in counted)
    assert counted[-1] == sum(start + length > 10 for start, length in spans)


def test_a_generator_that_is_well_leaves_no_doubts() -> None:
    figure = Spread.of([0.1])
    assert doubts(WELL, ttft=figure, tpot=figure) == []


def test_lag_is_doubtful_where_it_is_a_tenth_of_the_figure() -> None:
    health = GeneratorHealth(0.95, Spread.of([0.01] * 100), None)
    found = doubts(health, ttft=Spread.of([0.5]), tpot=Spread.of([0.02]))
    assert ["TPOT" in line or "95%" in line for line in found] == [True, True]


def test_short_answers_and_a_server_without_usage_are_noted() -> None:
    short = answered(0, 0.1, 0.02, num_tokens=5)
    silent = Result(0, 0, 0.0, 0.0, 1.0, 9, first_s=0.5, last_s=1.0, output_tokens=4, gaps=short.gaps)
    assert "1 of 1 answers are shorter" in make_point("c", 1, run(silent), None).notes[0]
    assert "does not report usage" in make_point("c", 1, run(silent), None).notes[1]
