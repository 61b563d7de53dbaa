"""GLM-4.5 to 4.7: a DeepSeek's experts under a plain attention, half of whose heads' dimensions are rotated. The larger
ones norm queries and keys."""

from __future__ import annotations

from dataclasses import replace

from penstock.model.layers import MLP, DecoderLayer, attention_spec, decoder_of
from penstock.model.ops import Layer, Rope
from penstock.model.ordered import ordered_attention
from penstock.model.rope import paired_rows
from penstock.model.sparse import SparseLayer, SparseMLP
from penstock.model.weights import Weights


def layer(weights: Weights, rope: Rope, index: int) -> Layer:
    config, inner = weights.config, weights.at("self_attn")
    spec = attention_spec(weights, index)
    if config.head_norms:
        order = paired_rows(config.head_dim, config.rotary_dim or config.head_dim).to(weights.ops.device)
        q_norm, k_norm = (inner.norm(f"{name}.weight", config.head_dim)[order] for name in ("q_norm", "k_norm"))
        spec = replace(spec, q_norm=q_norm, k_norm=k_norm, norm_eps=config.norm_eps)
    attention = ordered_attention(weights, spec, rope, bias=config.attention_bias)
    if config.has_experts(index):
        return SparseLayer(attention, SparseMLP.load(weights))
    return DecoderLayer(attention, MLP.load(weights))


load = decoder_of(layer)
