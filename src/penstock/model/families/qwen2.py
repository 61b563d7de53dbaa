"""Qwen2 and Qwen2.5: biases on q, k and v, always. The decoder of Qwen2.5-VL is one whose heads turn with images."""

from __future__ import annotations

from penstock.model.layers import MLP, Attention, DecoderLayer, attention_spec, decoder_of, mrope_layer
from penstock.model.ops import Layer, Rope
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> Layer:
    spec = attention_spec(weights, index)
    attention = Attention.load(weights, spec, rope, qkv_bias=True)
    if weights.config.rope_sections:
        return mrope_layer(attention, MLP.load(weights), index, weights.config)
    return DecoderLayer(attention, MLP.load(weights))


load = decoder_of(layer)
