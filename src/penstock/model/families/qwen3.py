"""Qwen3 (dense): each head of q and k is normed before it is rotated. The decoder of Qwen3-VL is one whose heads turn
with images, and that takes what its encoder adds."""

from __future__ import annotations

from dataclasses import replace

from penstock.model.layers import MLP, Attention, DecoderLayer, attention_spec, decoder_of, mrope_layer
from penstock.model.ops import AttentionSpec, Layer, Rope
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> Layer:
    attention = normed_attention(weights, rope, index)
    if weights.config.rope_sections:
        return mrope_layer(attention, MLP.load(weights), index, weights.config)
    return DecoderLayer(attention, MLP.load(weights))


def normed_attention(weights: Weights, rope: Rope, index: int) -> Attention:
    return Attention.load(weights, normed_heads(weights, index), rope, qkv_bias=weights.config.attention_bias)


def normed_heads(weights: Weights, index: int) -> AttentionSpec:
    config, inner = weights.config, weights.at("self_attn")
    return replace(
        attention_spec(weights, index),
        q_norm=inner.norm("q_norm.weight", config.head_dim),
        k_norm=inner.norm("k_norm.weight", config.head_dim),
        norm_eps=config.norm_eps,
    )


load = decoder_of(layer)
