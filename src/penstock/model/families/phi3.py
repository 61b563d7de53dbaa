"""Phi-3 and Phi-4: a Llama whose files have q, k and v as one tensor, and gate and up. Heads may be rotated in part."""

from __future__ import annotations

import torch
from torch import Tensor

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
from penstock.model.quantized import Weight
from penstock.model.rope import paired_rows
from penstock.model.shard import Axis, Split
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> DecoderLayer:
    config, inner, mlp = weights.config, weights.at("self_attn"), weights.at("mlp")
    hidden, ffn = config.hidden_size, config.intermediate_size
    spec = attention_spec(weights, index)
    attention = Attention(
        ops=weights.ops,
        norm=load_norm(weights, "input_layernorm"),
        qkv=_qkv(inner, spec),
        output=inner.linear({"o_proj": hidden}, query_heads(config), split=Split.ROWS, precise=weights.is_end_layer),
        spec=spec,
        rope=rope,
    )
    return DecoderLayer(
        attention,
        MLP(
            ops=weights.ops,
            norm=load_norm(weights, "post_attention_layernorm"),
            gate_up=mlp.linear(
                {"gate_up_proj": (Axis(ffn), Axis(ffn))}, hidden, split=Split.COLUMNS, precise=weights.is_end_layer
            ),
            down=mlp.linear({"down_proj": hidden}, ffn, split=Split.ROWS),
        ),
    )


def _qkv(weights: Weights, spec: AttentionSpec) -> Linear:
    config = weights.config
    joined = {"qkv_proj": (query_heads(config), kv_heads(config), kv_heads(config))}
    if config.rotary_dim is None:
        return weights.linear(joined, config.hidden_size, split=Split.COLUMNS)
    order = _order(spec, config.rotary_dim)
    linear = weights.ops.linear(_rows(weights.weight(joined, config.hidden_size, split=Split.COLUMNS), order))
    weights.note(linear, joined, config.hidden_size, split=Split.COLUMNS, order=order)
    return linear


def _order(spec: AttentionSpec, rotary_dim: int) -> Tensor:
    """Of the rows: within each head of q and k, what turns together lies a half apart."""
    num_rotated = spec.num_heads + spec.num_kv_heads
    heads = torch.arange((num_rotated + spec.num_kv_heads) * spec.head_dim).view(-1, spec.head_dim)
    heads[:num_rotated] = heads[:num_rotated, paired_rows(spec.head_dim, rotary_dim)]
    return heads.flatten()


def _rows(weight: Weight, ids: Tensor) -> Weight:
    if isinstance(weight, Tensor):
        return weight[ids.to(weight.device)]
    return weight.rows(ids)


load = decoder_of(layer)
