"""Llama 4, the part that speaks: three of four layers attend within chunks of the context and are rotated, the fourth
sees all and is not, with queries that grow with their position. A token goes to one expert, which is given the token
times the router's score, and to one that all tokens pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.model.attention_temperature import TemperedAttention, query_scales
from penstock.model.batch import Batch
from penstock.model.layers import (
    MLP,
    Attention,
    CausalLM,
    Decoder,
    DecoderLayer,
    LayerLoader,
    Progress,
    attention_spec,
)
from penstock.model.ops import Layer, LayerKV, Rope, Stream
from penstock.model.ops.experts import sigmoid
from penstock.model.ordered import ordered_attention
from penstock.model.sparse import SparseMLP
from penstock.model.weights import Weights


@dataclass(frozen=True, slots=True)
class ScaledInputMLP:
    """One expert for each token, of the token times its score; and one of every token as it is."""

    whole: SparseMLP

    def __call__(self, stream: Stream, batch: Batch | None = None) -> None:
        own, ops = self.whole, self.whole.ops
        x = ops.normed(stream, own.norm)
        logits = own.router(x)
        # Normalized, a weight says no more than whether this rank has the expert.
        ids, weights = ops.route(logits, own.per_token, normalized=True, experts=own.map, batch=batch)
        scores = sigmoid(logits.amax(dim=1, keepdim=True))
        found = own.experts(x * scores.to(x.dtype), ids, weights)
        if own.shared is not None:
            found = own.shared.beside(x, found)
        ops.add(stream, found if own.ranks is None else own.ranks.sum(found))


@dataclass(frozen=True, slots=True)
class Llama4Layer:
    attention: Attention | TemperedAttention
    mlp: MLP | ScaledInputMLP
    parts: None = None

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        self.attention(stream, kv, batch)
        if isinstance(self.mlp, MLP):
            self.mlp(stream)
        else:
            self.mlp(stream, batch)


def layers_of(weights: Weights) -> LayerLoader:
    config, ops = weights.config, weights.ops
    scales = query_scales(config, ops.device, weights.max_context)

    def layer(weights: Weights, rope: Rope, index: int) -> Layer:
        is_rotated, spec = index not in config.unrotated_layers, attention_spec(weights, index)
        if is_rotated and config.head_norms:
            ones = torch.ones(config.head_dim, dtype=ops.activation_dtype, device=ops.device)
            spec = replace(spec, q_norm=ones, k_norm=ones, norm_eps=config.norm_eps)
        attention = ordered_attention(weights, spec, rope, neighbours=True, bias=config.attention_bias)
        tempered = attention if is_rotated or scales is None else TemperedAttention(attention, scales)
        if config.has_experts(index):
            return Llama4Layer(tempered, ScaledInputMLP(SparseMLP.load(weights)))
        mlp = MLP.load(weights, block="feed_forward")
        return DecoderLayer(tempered, mlp) if isinstance(tempered, Attention) else Llama4Layer(tempered, mlp)

    return layer


def load(weights: Weights, progress: Progress) -> CausalLM:
    return Decoder.load(weights, layers_of(weights), progress)
