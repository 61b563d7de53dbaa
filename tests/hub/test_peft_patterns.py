"""Patterns that give layers of an adapter a rank of their own, as PEFT means them; none of them takes long."""

from __future__ import annotations

import re

import pytest

from penstock.hub.peft_patterns import LayerPatterns

LAYERS = [
    f"model.layers.{i}.{part}" for i in (0, 1, 10, 11) for part in ("self_attn.q_proj", "mlp.down_proj", "mlp.up")
]


def by_peft(patterns: dict[str, int], layer: str) -> int:
    """PEFT's `get_pattern_key`."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), 0)


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 1, "proj": 2, "down_proj": 3},
        {"model.layers.0.mlp.up": 1, "mlp.up": 2},
        {"mlp.up": 2, "model.layers.0.mlp.up": 1},
        {r"layers\.1\.mlp\.down_proj": 1},
        {"^model.layers.10.self_attn.q_proj": 1, "^layers.10.mlp.up": 2},
        {r"layers\.\d+\.mlp\..*": 1, "q_proj": 2},
        {r"layers.[0-9]+.self_attn.q_proj$": 1},
        {r"layers\.(0|11)\.(?:mlp|self_attn)\.(q_proj|up)": 1},
        {r"layers.(1|10|0)\.mlp.up": 1, r"q_proj|mlp\.down_proj": 2},
        {r".*q_proj": 1, r".*": 2},
        {r"model\.layers\.1\d\.mlp.+": 1},
    ],
)
def test_layers_match_as_in_peft(patterns: dict[str, int]) -> None:
    found = LayerPatterns(patterns, LAYERS)
    assert {layer: found.find(layer, 0) for layer in LAYERS} == {layer: by_peft(patterns, layer) for layer in LAYERS}


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(.*)*b",
        "(a|aa)+",
        ".*.*.*x",
        "(?=a)",
        r"(\w+)*",
        "a{5000}{5000}",
        "(" * 20,
        "",
        "^$",
        "x" * 300,
        "(a|(b|c))",
        r"\Z",
        "[a-z]+",
    ],
)
def test_a_pattern_that_is_more_than_a_name_with_marks_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        LayerPatterns({pattern: 8}, LAYERS)


def test_many_patterns_with_marks_on_many_layers_are_refused_and_names_are_not() -> None:
    layers = [f"layers.{i}.q_proj" for i in range(2000)]
    assert LayerPatterns({name: i for i, name in enumerate(layers)}, layers).find(layers[7], None) == 7
    with pytest.raises(ValueError, match="too many"):
        LayerPatterns({rf"layers.{i}\d.q_proj": i for i in range(20)}, layers)
    with pytest.raises(ValueError, match="too many"):
        LayerPatterns({".*q_proj": 8}, ["a" * 300])


def test_words_that_begin_alike_are_not_tried_in_every_combination() -> None:
    """Two to the power of forty ways to read it, if each were."""
    found = LayerPatterns({"(a|aa)" * 40: 8}, ["a" * 60 + "b"])
    assert found.find("a" * 60 + "b", 4) == 4
