"""Gemma 3, the part that speaks: a Gemma 2 without caps, with q and k normed as in Qwen3. Five of six layers see a
window, and have a rotation of their own."""

from __future__ import annotations

from penstock.model.families.gemma2 import GemmaLayer
from penstock.model.families.qwen3 import normed_attention
from penstock.model.layers import decoder_of
from penstock.model.ops import Rope
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> GemmaLayer:
    return GemmaLayer.of(weights, normed_attention(weights, rope, index))


load = decoder_of(layer)
