"""Qwen3 (dense): each head of q and k is normed before it is rotated. The decoder of Qwen3-VL is one whose heads turn
with images, and that takes what its encoder adds."""

from __future__ import annotations

from dataclasses import replace

from penstock.model.layers import MLP, Attention, DecoderLayer, attention_spec, decoder_of, turned_layer
from penstock.model.ops import Layer, Rope
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> Layer:
    attention = normed_attention(weights, rope, index)
    if weights.config.rope_sections:
        return turned_layer(attention, MLP.load(weights), index, weights.config)
    return DecoderLayer(attention, MLP.load(weights))


def normed_attention(weights: Weights, rope: Rope, index: int) -> Attention:
    config, inner = weights.config, weights.at("self_attn")
    spec = replace(
        attention_spec(weights, index),
        q_norm=inner.norm("q_norm.weight", config.head_dim),
        k_norm=inner.norm("k_norm.weight", config.head_dim),
        norm_eps=config.norm_eps,
    )
    return Attention.load(weights, spec, rope, qkv_bias=config.attention_bias)


load = decoder_of(layer)
