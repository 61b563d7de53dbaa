"""Placement of experts by load: properties that hold for all counts, and cases that show what it is for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.expert_placement import (
    ExpertPlacement,
    balanced_placement,
    imbalance_of,
    num_slots,
    plain_placement,
)


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Counts of a layer, ranks, and redundant experts of each."""
    num_experts = draw(st.integers(1, 24))
    num_ranks = draw(st.integers(1, min(num_experts, 6)))
    redundant = draw(st.integers(0, num_experts - -(-num_experts // num_ranks)))
    skewed = st.one_of(st.integers(0, 5), st.integers(0, 10_000))
    return draw(st.lists(skewed, min_size=num_experts, max_size=num_experts)), num_ranks, redundant


@given(loads())
def test_every_expert_has_a_place_and_no_rank_more_than_its_slots(load: tuple[list[int], int, int]) -> None:
    counts, num_ranks, redundant = load
    placed = balanced_placement(counts, num_ranks, redundant)
    assert {expert for own in placed.ranks for expert in own} == set(range(len(counts)))
    for own, size in zip(placed.ranks, num_slots(len(counts), num_ranks, redundant), strict=True):
        assert 1 <= len(set(own)) == len(own) <= size
    if not redundant:
        assert list(map(len, placed.ranks)) == num_slots(len(counts), num_ranks)


@given(loads())
def test_it_is_never_less_even_than_the_plain_placement(load: tuple[list[int], int, int]) -> None:
    counts, num_ranks, redundant = load
    plain = plain_placement(len(counts), num_ranks)
    placed = balanced_placement(counts, num_ranks, redundant)
    assert placed.imbalance(counts) <= plain.imbalance(counts)
    assert sum(placed.rank_loads(counts)) == pytest.approx(sum(counts))
    assert balanced_placement(counts, num_ranks, redundant) == placed


@given(loads(), st.randoms(use_true_random=False))
def test_those_who_stay_on_their_rank_stay_in_their_slots(load: tuple[list[int], int, int], dice: object) -> None:
    counts, num_ranks, redundant = load
    before = balanced_placement(counts, num_ranks, redundant)
    dice.shuffle(counts)  # type: ignore[attr-defined]
    wanted = balanced_placement(counts, num_ranks, redundant)
    placed = wanted.after(before)
    for old, new, own in zip(before.ranks, placed.ranks, wanted.ranks, strict=True):
        assert sorted(new) == sorted(own)
        assert all(new[slot] == expert for slot, expert in enumerate(old[: len(new)]) if expert in new)


def test_slots_are_equal_where_experts_divide() -> None:
    assert num_slots(8, 4, 1) == [3, 3, 3, 3]
    assert num_slots(8, 3) == [2, 3, 3]


def test_a_hot_expert_is_replicated() -> None:
    """One has half of all tokens: no rank can have less than that without a copy."""
    counts = [70, 10, 10, 10, 10, 10, 10, 10]
    alone = balanced_placement(counts, 4)
    assert alone.imbalance(counts) == pytest.approx(2.285714, abs=1e-6)
    copied = balanced_placement(counts, 4, 1)
    assert len(copied.copies[0]) > 1
    assert copied.imbalance(counts) < 1.2


def test_hot_experts_that_lie_together_are_spread() -> None:
    counts = [50, 50, 1, 1]
    assert plain_placement(4, 2).imbalance(counts) == pytest.approx(100 / 51)
    assert balanced_placement(counts, 2).imbalance(counts) == 1.0


def test_copies_that_would_make_it_worse_are_left_out() -> None:
    """5 + 1 and 3 + 3 are even as they are."""
    assert balanced_placement([5, 1, 3, 3], 2, 1).imbalance([5, 1, 3, 3]) == 1.0


def test_no_tokens_are_even() -> None:
    assert balanced_placement([0] * 4, 2, 1).imbalance([0] * 4) == 1.0
    assert imbalance_of([]) == 1.0


def test_layers_wait_for_their_own_busiest() -> None:
    """Two layers that are uneven the other way round are not even together."""
    assert imbalance_of([[3, 1], [1, 3]]) == 1.5


def test_more_copies_than_a_rank_has_room_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="a rank that has 4 more has all of them"):
        num_slots(8, 2, 5)


def test_copies_are_found_by_rank_and_slot() -> None:
    placed = ExpertPlacement(((0, 2), (1, 2)))
    assert placed.copies == {0: ((0, 0),), 1: ((1, 0),), 2: ((0, 1), (1, 1))}
    assert placed.rank_loads([4, 2, 6]) == [7, 5]
