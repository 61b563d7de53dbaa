"""Mixtral: a Mistral whose layers have eight experts in place of an MLP."""

from __future__ import annotations

from penstock.model.layers import Attention, attention_spec, decoder_of
from penstock.model.ops import Rope
from penstock.model.sparse import SparseLayer, SparseMLP
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> SparseLayer:
    attention = Attention.load(weights, attention_spec(weights, index), rope)
    return SparseLayer(attention, SparseMLP.load(weights))


load = decoder_of(layer)
