"""Ministral 3: a Llama whose queries grow with their position."""

from __future__ import annotations

from dataclasses import dataclass

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
from penstock.model.weights import Weights


@dataclass(frozen=True, slots=True)
class MinistralLayer:
    attention: TemperedAttention
    mlp: MLP
    parts: None = None

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        self.attention(stream, kv, batch)
        self.mlp(stream)


def layers_of(weights: Weights) -> LayerLoader:
    scales = query_scales(weights.config, weights.ops.device, weights.max_context)

    def layer(weights: Weights, rope: Rope, index: int) -> Layer:
        attention = Attention.load(weights, attention_spec(weights, index), rope)
        mlp = MLP.load(weights)
        if scales is None:
            return DecoderLayer(attention, mlp)
        return MinistralLayer(TemperedAttention(attention, scales), mlp)

    return layer


def load(weights: Weights, progress: Progress) -> CausalLM:
    return Decoder.load(weights, layers_of(weights), progress)
