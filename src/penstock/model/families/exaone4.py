"""EXAONE 4: norms behind attention and MLP as in OLMo 2, and of each head of q and k. Three of four layers see a window
in the larger one, and those that see all are not rotated."""

from __future__ import annotations

from penstock.model.families.olmo2 import OlmoLayer
from penstock.model.families.qwen3 import normed_heads
from penstock.model.layers import decoder_of
from penstock.model.ops import Rope
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> OlmoLayer:
    return OlmoLayer.load(weights, rope, normed_heads(weights, index))


load = decoder_of(layer)
