"""Qwen2-MoE and Qwen1.5-MoE: a Qwen2 with many small experts, and one more that every token passes."""

from __future__ import annotations

from penstock.model.layers import MLP, Attention, DecoderLayer, attention_spec, decoder_of
from penstock.model.ops import Layer, Rope
from penstock.model.sparse import SparseLayer, SparseMLP
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> Layer:
    attention = Attention.load(weights, attention_spec(weights, index), rope, qkv_bias=True)
    if weights.config.has_experts(index):
        return SparseLayer(attention, SparseMLP.load(weights))
    return DecoderLayer(attention, MLP.load(weights))


load = decoder_of(layer)
