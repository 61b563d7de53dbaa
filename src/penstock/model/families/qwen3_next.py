"""Qwen3-Next: three layers of linear attention, then one of attention with a gate; many small experts and a shared one.
A head of keys has all that belongs to it side by side in the file."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.model_config import LinearAttention
from penstock.model.layers import decoder_of
from penstock.model.linear_attention import (
    GatedDeltaNet,
    HybridLayer,
    hybrid_layer,
    key_heads,
    load_delta_net,
    ordered_linear,
)
from penstock.model.ops import Rope
from penstock.model.weights import Weights


def delta_net(layer: Weights) -> GatedDeltaNet:
    config, weights, linear = layer.config, layer.at("linear_attn"), layer.config.linear
    assert linear is not None
    served = linear.num_value_heads // linear.num_key_heads
    own = layer.shard.span(key_heads(linear, 1), f"tensor '{weights.prefix}in_proj_qkvz.weight'")
    of_head = key_heads(linear, 2 * linear.key_dim + 2 * served * linear.value_dim)
    inputs = ordered_linear(
        weights, {"in_proj_qkvz": of_head}, config.hidden_size, _sorted_rows(len(own), _sizes(linear))
    )
    # Never quantized: it is small, and a state that forgets a little faster has forgotten all of it after a while.
    ba = weights.tensor("in_proj_ba.weight", 2 * linear.num_value_heads, config.hidden_size)
    ba = ba[own.start * 2 * served : own.stop * 2 * served]
    order = _sorted_rows(len(own), (served, served))
    return load_delta_net(layer, inputs, layer.ops.linear(ba[order.to(ba.device)]))


def _sizes(linear: LinearAttention) -> tuple[int, ...]:
    """Rows of one head of keys: its queries, its keys, and the values and gates that it serves."""
    values = linear.num_value_heads // linear.num_key_heads * linear.value_dim
    return linear.key_dim, linear.key_dim, values, values


def _sorted_rows(num_heads: int, sizes: tuple[int, ...]) -> Tensor:
    """Rows of all heads, first by what they are and then by head."""
    rows = torch.arange(num_heads * sum(sizes)).view(num_heads, -1)
    return torch.cat([part.flatten() for part in rows.split_with_sizes(list(sizes), dim=1)])


def layer(weights: Weights, rope: Rope, index: int) -> HybridLayer:
    return hybrid_layer(weights, rope, index, delta_net)


load = decoder_of(layer)
