from __future__ import annotations

from penstock.core.expert_load import ExpertLoad, LayerLoad


def load(scale: int) -> ExpertLoad:
    first = LayerLoad([3 * scale, scale], [[0], [1]], [3 * scale, scale])
    second = LayerLoad([scale, 3 * scale], [[0], [1]], [scale, 3 * scale], first_rank=2)
    return ExpertLoad({0: first, 1: second})


def test_ranks_are_counted_through_all_stages() -> None:
    assert load(1).tokens_by_rank == {0: 3, 1: 1, 2: 1, 3: 3}
    assert load(1).num_tokens == 8


def test_imbalance_is_taken_layer_by_layer() -> None:
    assert load(1).rank_imbalance == load(1).expert_imbalance == 1.5


def test_what_came_since_is_the_difference() -> None:
    assert load(3).since(load(1)) == load(2)
    assert load(3).since(ExpertLoad()) == load(3), "of a layer that was not heard of before it is all"


def test_ranks_that_have_a_part_of_each_expert_are_even() -> None:
    assert ExpertLoad({0: LayerLoad([5, 1])}).rank_imbalance == 1.0
    assert ExpertLoad({0: LayerLoad([5, 1])}).tokens_by_rank == {}
