"""Qwen3-MoE: a Qwen3 with many small experts; none that all tokens pass."""

from __future__ import annotations

from penstock.model.families.qwen3 import normed_attention
from penstock.model.layers import MLP, DecoderLayer, decoder_of
from penstock.model.ops import Layer, Rope
from penstock.model.sparse import SparseLayer, SparseMLP
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> Layer:
    attention = normed_attention(weights, rope, index)
    if weights.config.has_experts(index):
        return SparseLayer(attention, SparseMLP.load(weights))
    return DecoderLayer(attention, MLP.load(weights))


load = decoder_of(layer)
