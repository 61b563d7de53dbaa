from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ModelUnsupported
from penstock.model.stages import Stage, stage_layers
from tests.model.family_configs import SHAPE


@given(st.integers(1, 12), st.integers(1, 6), st.sampled_from([64, 400, 4000, 20_000]))
def test_no_other_division_has_a_shorter_longest_stage(num_layers: int, count: int, vocab_size: int) -> None:
    """The head counts with the last stage: with a large vocabulary it has fewer layers."""
    config = replace(SHAPE, num_layers=num_layers, vocab_size=vocab_size)
    if count > num_layers:
        with pytest.raises(ModelUnsupported, match=f"{count} pipeline stages, but the model has {num_layers} layers"):
            stage_layers(config, count)
        return
    layer_weights = SHAPE.hidden_size * (2 * 6 * SHAPE.head_dim + 3 * SHAPE.intermediate_size)
    head = vocab_size * SHAPE.hidden_size / layer_weights

    def longest(sizes: list[int]) -> float:
        return max([*sizes[:-1], sizes[-1] + head])

    stages = stage_layers(config, count)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert all(stages)
    cuts = combinations(range(1, num_layers), count - 1)
    best = min(longest([end - begin for begin, end in pairwise([0, *cut, num_layers])]) for cut in cuts)
    assert longest([len(stage) for stage in stages]) == pytest.approx(best)


def test_a_linear_is_elsewhere_if_another_stage_has_its_layer() -> None:
    second = Stage(range(2, 5))
    assert not second.is_elsewhere("model.layers.2.mlp.up_proj", 5)
    assert second.is_elsewhere("model.layers.1.mlp.up_proj", 5)
    for nowhere in (
        "model.layers.5.mlp.up_proj",
        "model.layers.10000000000.mlp.up_proj",
        "lm_head",
        "model.layers.x.a",
    ):
        assert not second.is_elsewhere(nowhere, 5)
    assert not Stage().is_elsewhere("model.layers.1.mlp.up_proj", 5)
