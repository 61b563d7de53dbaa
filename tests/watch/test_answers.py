from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from penstock.watch.answers import KnownAnswers, SaidToken, compare
from tests.watch.fleet import hello

KNOWN = hello(Random(0), noise=0.0)
GARBAGE = tuple(SaidToken("#", -0.1, {"#": -0.1, "?": -4.0}) for _ in range(5))


@given(st.integers(), st.floats(0.0, 0.2))
def test_harmless_numerics_are_the_same_answer(seed: int, noise: float) -> None:
    assert compare(KNOWN, hello(Random(seed), noise)).is_same


def test_another_token_is_the_same_answer_if_it_was_a_near_tie() -> None:
    ours = (SaidToken("a", -0.70, {"a": -0.70, "b": -0.75}), SaidToken("x", -0.1, {}))
    theirs = (SaidToken("b", -0.69, {"b": -0.69, "a": -0.74}), SaidToken("y", -0.1, {}))
    assert compare(ours, theirs).is_same


def test_corruption_shows_in_tokens_and_in_their_probabilities() -> None:
    assert not compare(KNOWN, GARBAGE).is_same
    unsure = tuple(SaidToken(one.text, one.logprob - 1.5, one.others) for one in KNOWN)
    assert "off by 1.50" in compare(KNOWN, unsure).reason
    assert "stops after 2" in compare(KNOWN, KNOWN[:2]).reason
    assert not compare(KNOWN, ()).is_same


def test_what_most_replicas_say_becomes_known() -> None:
    answers, random = KnownAnswers(), Random(1)
    answers.said(["a", "b", "c"], {"a": GARBAGE, "b": hello(random), "c": hello(random)}, 1.0)
    assert [answers.statuses[name].state for name in "abc"] == ["wrong", "ok", "ok"]


def test_two_that_do_not_agree_are_both_suspect_after_a_while() -> None:
    answers = KnownAnswers()
    for _ in range(3):
        answers.said(["a", "b"], {"a": GARBAGE, "b": KNOWN}, 1.0)
        assert {one.state for one in answers.statuses.values()} == {"learning"}
    answers.said(["a", "b"], {"a": GARBAGE, "b": KNOWN}, 1.0)
    assert {one.reason for one in answers.statuses.values()} == {"the replicas do not agree"}


def test_what_is_known_is_not_unlearnt_by_many_who_are_wrong() -> None:
    answers = KnownAnswers(KNOWN)
    answers.said(["a", "b"], {"a": GARBAGE, "b": GARBAGE}, 1.0)
    assert {one.state for one in answers.statuses.values()} == {"wrong"}


def test_silence_is_a_failure_and_who_is_gone_is_forgotten() -> None:
    answers = KnownAnswers(KNOWN)
    answers.said(["a", "b"], {"a": None, "b": KNOWN}, 1.0)
    assert answers.statuses["a"].state == "failed"
    answers.said(["b"], {"b": KNOWN}, 2.0)
    assert list(answers.statuses) == ["b"]
