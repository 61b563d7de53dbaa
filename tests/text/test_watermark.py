from __future__ import annotations

import math
import random
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.core.watermark import Scheme, Seeding, Watermark
from penstock.text.watermark import ENOUGH_TOKENS, Verdict, binomial_tail, detect, gamma_tail

KINDS = {
    "green": Watermark(bytes(32)),
    "self": Watermark(bytes(32), seeding=Seeding.SELF),
    "gumbel": Watermark(bytes(32), Scheme.GUMBEL),
}


def under(kind: str, secret: bytes) -> Watermark:
    mark = KINDS[kind]
    return Watermark(secret, mark.scheme, seeding=mark.seeding)


@given(st.integers(0, 60), st.data(), st.sampled_from([0.25, 0.5, 0.1]))
def test_the_binomial_tail_is_the_sum_of_its_terms(trials: int, data: st.DataObject, chance: float) -> None:
    successes = data.draw(st.integers(0, trials))
    p = Fraction(chance)
    exact = sum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(successes, trials + 1))
    assert binomial_tail(successes, trials, chance) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize(
    ("total", "terms", "chance"), [(3.0, 1, math.exp(-3)), (5.0, 3, math.exp(-5) * 18.5), (0, 4, 1)]
)
def test_the_gamma_tail_is_that_of_a_poisson_process(total: float, terms: int, chance: float) -> None:
    assert gamma_tail(total, terms) == pytest.approx(chance)


def test_tails_of_very_unlikely_things_are_zero_and_no_error() -> None:
    assert binomial_tail(3000, 3000, 0.25) == 0.0
    assert gamma_tail(50_000.0, 3000) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_texts_without_a_mark_are_significant_as_often_as_p_values_promise(kind: str) -> None:
    """Texts of few words, which repeat themselves as real ones do: that must not make them look marked."""
    rng = random.Random(kind)
    values = []
    for _ in range(400):
        ids = [min(int(rng.paretovariate(0.8)), 500) for _ in range(120)]
        values.append(detect(ids + ids[:60], under(kind, rng.randbytes(32))).p_value)
    for level in (0.5, 0.1, 0.02):
        share = sum(value <= level for value in values) / len(values)
        assert share <= level + 4 * math.sqrt(level * (1 - level) / len(values))
        assert share > 0  # a test that never speaks is none


@pytest.mark.parametrize("kind", KINDS)
def test_what_repeats_counts_once(kind: str) -> None:
    rng = random.Random(3)
    ids = [rng.randrange(1000) for _ in range(200)]
    once, often = (detect(text, KINDS[kind]) for text in (ids, ids * 4))
    assert once.num_scored <= often.num_scored <= once.num_scored + 4  # where one copy goes over into the next
    assert often.score - once.score <= 12
    assert detect([7] * 500, KINDS[kind]).num_scored == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", range(6))
def test_very_short_texts_are_too_short_to_tell(kind: str, length: int) -> None:
    finding = detect(list(range(length)), KINDS[kind])
    assert finding.num_tokens == length
    assert finding.num_scored == max(0, length - 4)
    assert finding.verdict() is Verdict.TOO_SHORT


def test_long_texts_without_a_mark_are_told_so() -> None:
    rng = random.Random(4)
    finding = detect([rng.randrange(1000) for _ in range(ENOUGH_TOKENS + 4)], KINDS["green"])
    assert finding.verdict() is Verdict.NOT_FOUND


def test_a_short_text_can_still_be_found_out() -> None:
    """All of it green: the verdict is about the evidence, not about the length."""
    mark, rng = KINDS["green"], random.Random(5)
    ids = [rng.randrange(1000) for _ in range(4)]
    while len(ids) < 24:
        candidate = rng.randrange(1000)
        if detect([*ids[-4:], candidate], mark).score:
            ids.append(candidate)
    assert detect(ids, mark).verdict() is Verdict.FOUND
