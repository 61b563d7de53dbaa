from __future__ import annotations

from random import Random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.workload.lengths import Lengths


@given(st.integers(1, 10**6), st.integers(0, 1000), st.integers())
def test_a_uniform_length_lies_between_its_ends(least: int, more: int, seed: int) -> None:
    lengths = Lengths.parse(f"{least}:{least + more}")
    assert all(least <= lengths.draw(Random(f"{seed} {n}")) <= least + more for n in range(20))


@given(st.sampled_from(["normal", "lognormal"]), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 9000))
def test_a_drawn_length_is_at_least_one_and_at_most_the_most(kind: str, mean: int, spread: int, most: int) -> None:
    lengths = Lengths.parse(f"{kind}:{mean}:{spread}:{most}")
    source = Random(f"{mean} {spread}")
    assert all(1 <= lengths.draw(source) <= most for _ in range(50))


@pytest.mark.parametrize("text", ["512", "100:300", "normal:500:50", "lognormal:500:200"])
def test_the_mean_and_the_spread_are_those_asked_for(text: str) -> None:
    lengths, source = Lengths.parse(text), Random(1)
    drawn = [lengths.draw(source) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(lengths.mean, rel=0.02)
    if lengths.kind.endswith("normal"):
        assert stdev(drawn) == pytest.approx(lengths.second, rel=0.06)


@pytest.mark.parametrize("text", ["128", "1:2", "normal:3:4", "lognormal:1000000:6:7"])
def test_a_length_is_told_as_it_is_given(text: str) -> None:
    assert str(Lengths.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "5:2", "1:2:3", "normal", "normal:5", "gauss:1:2", "1.5", "normal:1:2:3:4"]
)
def test_what_is_no_length_is_told_with_what_is(text: str) -> None:
    with pytest.raises(ConfigError, match="lognormal:MEAN:SD"):
        Lengths.parse(text)
