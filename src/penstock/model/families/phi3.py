"""Phi-3 and Phi-4: a Llama whose files have q, k and v as one tensor, and gate and up. Heads may be rotated in part."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.model.layers import MLP, Attention, DecoderLayer, attention_spec, decoder_of, load_norm
from penstock.model.ops import Linear, Rope
from penstock.model.quantized import Weight
from penstock.model.rope import paired_rows
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> DecoderLayer:
    config, inner, mlp = weights.config, weights.at("self_attn"), weights.at("mlp")
    hidden, ffn = config.hidden_size, config.intermediate_size
    attention = Attention(
        ops=weights.ops,
        norm=load_norm(weights, "input_layernorm"),
        qkv=_qkv(inner),
        output=inner.linear({"o_proj": hidden}, config.num_heads * config.head_dim),
        spec=attention_spec(config, index),
        rope=rope,
    )
    return DecoderLayer(
        attention,
        MLP(
            ops=weights.ops,
            norm=load_norm(weights, "post_attention_layernorm"),
            gate_up=mlp.linear({"gate_up_proj": 2 * ffn}, hidden),
            down=mlp.linear({"down_proj": hidden}, ffn),
        ),
    )


def _qkv(weights: Weights) -> Linear:
    config = weights.config
    joined = {"qkv_proj": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim}
    if config.rotary_dim is None:
        return weights.linear(joined, config.hidden_size)
    order = _order(config, config.rotary_dim)
    linear = weights.ops.linear(_rows(weights.weight(joined, config.hidden_size), order))
    weights.note(linear, joined, config.hidden_size, order)
    return linear


def _order(config: ModelConfig, rotary_dim: int) -> Tensor:
    """Of the rows: within each head of q and k, what turns together lies a half apart."""
    num_rotated = config.num_heads + config.num_kv_heads
    heads = torch.arange((num_rotated + config.num_kv_heads) * config.head_dim).view(-1, config.head_dim)
    heads[:num_rotated] = heads[:num_rotated, paired_rows(config.head_dim, rotary_dim)]
    return heads.flatten()


def _rows(weight: Weight, ids: Tensor) -> Weight:
    if isinstance(weight, Tensor):
        return weight[ids.to(weight.device)]
    return weight.rows(ids)


load = decoder_of(layer)
