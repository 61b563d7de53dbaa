"""ERNIE 4.5 (dense): a Llama whose heads turn by neighbours."""

from __future__ import annotations

from penstock.model.layers import MLP, DecoderLayer, attention_spec, decoder_of
from penstock.model.ops import Rope
from penstock.model.ordered import ordered_attention
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> DecoderLayer:
    attention = ordered_attention(weights, attention_spec(weights, index), rope, neighbours=True)
    return DecoderLayer(attention, MLP.load(weights))


load = decoder_of(layer)
