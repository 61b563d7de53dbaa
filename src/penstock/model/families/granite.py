"""Granite 3 and 4: a Llama, or a Mixtral, that scales embeddings, scores, logits and what each layer adds, as
`ModelConfig` says; in mixtures there may be an expert that all tokens pass. Its Mamba layers are not built."""

from __future__ import annotations

from penstock.model.layers import MLP, Attention, DecoderLayer, attention_spec, decoder_of
from penstock.model.ops import Layer, Rope
from penstock.model.sparse import SparseLayer, SparseMLP
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> Layer:
    spec = attention_spec(weights, index)
    attention = Attention.load(weights, spec, rope, qkv_bias=weights.config.attention_bias)
    if weights.config.has_experts(index):
        return SparseLayer(attention, SparseMLP.load(weights))
    return DecoderLayer(attention, MLP.load(weights))


load = decoder_of(layer)
