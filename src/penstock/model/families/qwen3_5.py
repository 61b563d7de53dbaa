"""Qwen3.5, dense and as a mixture of experts: Qwen3-Next's layers, whose inputs lie apart in the file."""

from __future__ import annotations

import torch

from penstock.model.layers import decoder_of
from penstock.model.linear_attention import GatedDeltaNet, HybridLayer, hybrid_layer, key_heads, load_delta_net
from penstock.model.ops import Rope
from penstock.model.shard import Split
from penstock.model.weights import Weights


def delta_net(layer: Weights) -> GatedDeltaNet:
    config, weights, linear = layer.config, layer.at("linear_attn"), layer.config.linear
    assert linear is not None
    served = linear.num_value_heads // linear.num_key_heads
    keys, values = key_heads(linear, linear.key_dim), key_heads(linear, served * linear.value_dim)
    inputs = weights.linear(
        {"in_proj_qkv": (keys, keys, values), "in_proj_z": values},
        config.hidden_size,
        split=Split.COLUMNS,
    )
    own = layer.shard.span(key_heads(linear, served), f"tensor '{weights.prefix}in_proj_b.weight'")
    # Never quantized: see qwen3_next.
    parts = [
        weights.tensor(f"in_proj_{each}.weight", linear.num_value_heads, config.hidden_size)[own.start : own.stop]
        for each in "ba"
    ]
    return load_delta_net(layer, inputs, layer.ops.linear(torch.cat(parts)))


def layer(weights: Weights, rope: Rope, index: int) -> HybridLayer:
    return hybrid_layer(weights, rope, index, delta_net)


load = decoder_of(layer)
