"""Phi-3 and Phi-4: a Llama whose files have q, k and v as one tensor, and gate and up. Heads may be rotated in part."""

from __future__ import annotations

from penstock.model.layers import (
    MLP,
    Attention,
    DecoderLayer,
    attention_spec,
    decoder_of,
    kv_heads,
    load_norm,
    query_heads,
)
from penstock.model.ops import AttentionSpec, Linear, Rope
from penstock.model.ordered import ordered_qkv
from penstock.model.shard import Split
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> DecoderLayer:
    config, inner = weights.config, weights.at("self_attn")
    spec = attention_spec(weights, index)
    attention = Attention(
        ops=weights.ops,
        norm=load_norm(weights, "input_layernorm"),
        qkv=_qkv(inner, spec),
        output=inner.linear(
            {"o_proj": config.hidden_size}, query_heads(config), split=Split.ROWS, precise=weights.is_end_layer
        ),
        spec=spec,
        rope=rope,
    )
    return DecoderLayer(attention, MLP.load(weights, is_joined=True))


def _qkv(weights: Weights, spec: AttentionSpec) -> Linear:
    config = weights.config
    joined = {"qkv_proj": (query_heads(config), kv_heads(config), kv_heads(config))}
    if config.rotary_dim is None:
        return weights.linear(joined, config.hidden_size, split=Split.COLUMNS)
    return ordered_qkv(weights, spec, outputs=joined)


load = decoder_of(layer)
