"""Projections to heads whose dimensions lie in another order here than in the files: kernels rotate the halves of whole
heads, so what turns together is brought there when weights are loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.model.layers import Attention, kv_heads, load_norm, query_heads
from penstock.model.ops import AttentionSpec, Linear, Rope
from penstock.model.quantized import Weight
from penstock.model.rope import paired_rows
from penstock.model.shard import Split
from penstock.model.weights import Outputs, Weights


def ordered_attention(
    layer: Weights, spec: AttentionSpec, rope: Rope, *, neighbours: bool = False, bias: bool = False
) -> Attention:
    """An attention as usual, but for the order of its heads' dimensions: see `ordered_qkv`."""
    config, weights = layer.config, layer.at("self_attn")
    return Attention(
        ops=weights.ops,
        norm=load_norm(layer, "input_layernorm"),
        qkv=ordered_qkv(weights, spec, neighbours=neighbours, bias=bias),
        output=weights.linear(
            {"o_proj": config.hidden_size},
            query_heads(config),
            split=Split.ROWS,
            bias=config.output_bias,
            precise=weights.is_end_layer,
        ),
        spec=spec,
        rope=rope,
    )


def ordered_qkv(
    weights: Weights,
    spec: AttentionSpec,
    *,
    outputs: Outputs | None = None,
    neighbours: bool = False,
    bias: bool = False,
) -> Linear:
    """Queries, keys and values side by side. `outputs`: where files have them joined. `neighbours`: dimensions that
    follow each other turn together (interleaved rotary embeddings)."""
    config = weights.config
    keys = kv_heads(config)
    made_of = outputs or {"q_proj": query_heads(config), "k_proj": keys, "v_proj": keys}
    order = head_order(spec, config.rotary_dim or spec.head_dim, neighbours=neighbours)
    biases = weights.bias(made_of, config.hidden_size, split=Split.COLUMNS) if bias else None
    if biases is not None:
        biases = biases[order.to(biases.device)]
    linear = weights.ops.linear(_rows(weights.weight(made_of, config.hidden_size, split=Split.COLUMNS), order), biases)
    weights.note(linear, made_of, config.hidden_size, split=Split.COLUMNS, order=order)
    return linear


def head_order(spec: AttentionSpec, rotary_dim: int, *, neighbours: bool = False) -> Tensor:
    """Order of the rows in which dimensions of q and k that are rotated together lie half a head apart."""
    num_rotated = spec.num_heads + spec.num_kv_heads
    heads = torch.arange((num_rotated + spec.num_kv_heads) * spec.head_dim).view(-1, spec.head_dim)
    heads[:num_rotated] = heads[:num_rotated, paired_rows(spec.head_dim, rotary_dim, neighbours=neighbours)]
    return heads.flatten()


def _rows(weight: Weight, ids: Tensor) -> Weight:
    if isinstance(weight, Tensor):
        return weight[ids.to(weight.device)]
    return weight.rows(ids)
