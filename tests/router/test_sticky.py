from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.router.sticky import is_among, race, session_bucket

_random = Random(7)
LOTS = [_random.random() for _ in range(40_000)]
lots = st.floats(0, 1, exclude_max=True)
weights = st.lists(st.floats(0, 1000), min_size=2, max_size=6).filter(any)


def runners(weights: list[float]) -> list[tuple[str, float]]:
    return [(f"m@v{number}", weight) for number, weight in enumerate(weights, start=1)]


def shares(weights: list[float]) -> list[float]:
    competing = runners(weights)
    won = Counter(race(bucket, competing) for bucket in LOTS)
    return [won[name] / len(LOTS) for name, _ in competing]


@pytest.mark.parametrize("weights", [[90, 10], [1, 1, 1], [0, 1, 3], [50, 30, 15, 5], [0, 0, 1, 1], [0, 7]])
def test_everybody_gets_what_its_weight_says(weights: list[float]) -> None:
    expected = [weight / sum(weights) for weight in weights]
    assert shares(weights) == pytest.approx(expected, abs=0.01)  # four deviations


@pytest.mark.parametrize("percent", range(0, 101, 7))
def test_of_two_the_shares_are_exact(percent: int) -> None:
    competing = runners([100 - percent, percent])
    won = [race(number / 1000, competing) for number in range(1000)]
    assert won.count("m@v2") == pytest.approx(10 * percent, abs=1)


@given(lots, weights)
@example(0.5, [0.0, 5e-324])
@example(0.5, [0.0, 0.0, 5e-324])
def test_the_same_lot_falls_to_the_same_one_and_never_to_one_without_weight(
    bucket: float, weights: list[float]
) -> None:
    winner = race(bucket, runners(weights))
    assert winner == race(bucket, runners(weights))
    assert dict(runners(weights))[winner] > 0


@given(lots, weights, st.data())
def test_who_is_raised_takes_and_nobody_else_moves(bucket: float, weights: list[float], data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(weights) - 1))
    raised = [*weights[:number], weights[number] + data.draw(st.floats(0.1, 1000)), *weights[number + 1 :]]
    before, after = race(bucket, runners(weights)), race(bucket, runners(raised))
    assert after in (before, f"m@v{number + 1}")


@given(lots, st.lists(st.integers(0, 100), min_size=2, max_size=8))
def test_a_canary_that_grows_lets_nobody_go(bucket: float, percents: list[int]) -> None:
    """Of two versions, in steps up and down: who is with the canary at some share is with it at every larger one."""
    with_canary = [race(bucket, runners([100 - percent, percent])) == "m@v2" for percent in sorted(percents)]
    assert all(now <= then for now, then in pairwise(with_canary))


@given(lots, weights)
def test_a_version_that_is_added_moves_nobody_until_it_has_weight(bucket: float, weights: list[float]) -> None:
    assert race(bucket, runners([*weights, 0.0])) == race(bucket, runners(weights))


def test_sessions_are_spread_evenly_and_each_has_its_lot() -> None:
    found = [session_bucket(f"acme/{number}") for number in range(10_000)]
    assert [session_bucket(f"acme/{number}") for number in range(10_000)] == found
    assert sum(bucket < 0.1 for bucket in found) == pytest.approx(1000, abs=100)
    assert all(0 <= bucket < 1 for bucket in found)


@pytest.mark.parametrize(("weights", "winner"), [([50, 50], "m@v1"), ([1, 1, 1], "m@v3")])
def test_a_sample_is_independent_of_who_won(weights: list[float], winner: str) -> None:
    """Also of one that won by a number that is made of its name, as the sample's is."""
    competing = runners(weights)
    won = [bucket for bucket in LOTS if race(bucket, competing) == winner]
    for name, _ in competing:
        assert sum(is_among(bucket, name, 0.05) for bucket in won) / len(won) == pytest.approx(0.05, abs=0.006)
        assert all(is_among(bucket, name, 1.0) and not is_among(bucket, name, 0.0) for bucket in LOTS[:1000])
