"""gpt-oss: every other layer sees a window, each head has an attention sink, experts have biases and a clamped SwiGLU.
`ModelConfig` says what is counted and clamped how."""

from __future__ import annotations

from dataclasses import replace

from penstock.model.layers import Attention, attention_spec, decoder_of, query_heads
from penstock.model.ops import Rope
from penstock.model.sparse import SparseLayer, SparseMLP
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> SparseLayer:
    config = weights.config
    sinks = weights.at("self_attn").sinks("sinks", query_heads(config))
    spec = replace(attention_spec(weights, index), sinks=sinks)
    return SparseLayer(Attention.load(weights, spec, rope, qkv_bias=config.attention_bias), SparseMLP.load(weights))


load = decoder_of(layer)
