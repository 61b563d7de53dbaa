"""Llama, and the many that took its shape (SmolLM, TinyLlama, Yi): the shared layers as they are."""

from __future__ import annotations

from penstock.model.layers import MLP, Attention, DecoderLayer, attention_spec, decoder_of
from penstock.model.ops import Rope
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> DecoderLayer:
    spec = attention_spec(weights, index)
    attention = Attention.load(weights, spec, rope, qkv_bias=weights.config.attention_bias)
    return DecoderLayer(attention, MLP.load(weights))


load = decoder_of(layer)
