"""Gemma 3, the part that speaks: a Gemma 2 without caps, with q and k normed as in Qwen3. Five of six layers see a
window, and have a rotation of their own."""

from __future__ import annotations

from dataclasses import replace

from penstock.model.families.gemma2 import GemmaLayer
from penstock.model.families.qwen3 import normed_attention
from penstock.model.layers import CausalLM, Decoder, LayerLoader, Progress
from penstock.model.ops import Rope
from penstock.model.rope import rope_tables
from penstock.model.weights import Weights


def layers_of(weights: Weights) -> LayerLoader:
    config = weights.config
    assert config.local_rope_theta is not None
    nearby = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
    local = rope_tables(nearby, weights.ops.device)

    def layer(weights: Weights, rope: Rope, index: int) -> GemmaLayer:
        own = rope if config.window(index) is None else local
        return GemmaLayer.of(weights, normed_attention(weights, own, index))

    return layer


def load(weights: Weights, progress: Progress) -> CausalLM:
    return Decoder.load(weights, layers_of(weights), progress)
