"""OLMoE: many small experts under an attention whose queries and keys are normed over all heads."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.batch import Batch
from penstock.model.layers import Attention, attention_spec, decoder_of
from penstock.model.ops import LayerKV, Rope, Stream
from penstock.model.sparse import SparseMLP
from penstock.model.weights import Weights
from penstock.model.whole_norm import HeadNorms


@dataclass(frozen=True, slots=True)
class OlmoeLayer:
    attention: Attention
    heads: HeadNorms
    mlp: SparseMLP
    parts: None = None

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        own, ops = self.attention, self.attention.ops
        qkv = self.heads(ops.norm_linear(stream, own.norm, own.qkv))
        ops.add_linear(stream, ops.attention(qkv, own.spec, own.rope, kv, batch), own.output)
        self.mlp(stream, batch)


def layer(weights: Weights, rope: Rope, index: int) -> OlmoeLayer:
    attention = Attention.load(weights, attention_spec(weights, index), rope)
    return OlmoeLayer(attention, HeadNorms.load(weights.at("self_attn")), SparseMLP.load(weights))


load = decoder_of(layer)
