"""MiniMax-M2: many experts chosen as DeepSeek's are, under an attention whose queries and keys are normed over all
heads, and whose heads are rotated in part."""

from __future__ import annotations

from penstock.model.families.olmoe import OlmoeLayer
from penstock.model.layers import attention_spec, decoder_of
from penstock.model.ops import Rope
from penstock.model.ordered import ordered_attention
from penstock.model.sparse import SparseMLP
from penstock.model.weights import Weights
from penstock.model.whole_norm import HeadNorms


def layer(weights: Weights, rope: Rope, index: int) -> OlmoeLayer:
    attention = ordered_attention(weights, attention_spec(weights, index), rope)
    return OlmoeLayer(attention, HeadNorms.load(weights.at("self_attn")), SparseMLP.load(weights))


load = decoder_of(layer)
