"""Qwen2 and Qwen2.5: biases on q, k and v, always."""

from __future__ import annotations

from penstock.model.layers import MLP, Attention, DecoderLayer, attention_spec, decoder_of
from penstock.model.ops import Rope
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> DecoderLayer:
    spec = attention_spec(weights, index)
    return DecoderLayer(Attention.load(weights, spec, rope, qkv_bias=True), MLP.load(weights))


load = decoder_of(layer)
