"""Gemma 2: what attention and MLP give is normed before it is added, every other layer sees a window, scores and logits
are capped. `ModelConfig` says what is counted, scaled and capped how."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.model_config import Activation
from penstock.model.batch import Batch
from penstock.model.layers import MLP, Attention, attention_spec, decoder_of, load_norm
from penstock.model.ops import LayerKV, Norm, Rope, Stream
from penstock.model.weights import Weights


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    attention: Attention
    attention_end: Norm
    mlp: MLP
    mlp_end: Norm
    activation: Activation
    mlp_norm: str = "pre_feedforward_layernorm"  # what files call the norm before the MLP
    parts: None = None

    @classmethod
    def of(cls, weights: Weights, attention: Attention) -> GemmaLayer:
        return cls(
            attention=attention,
            attention_end=load_norm(weights, "post_attention_layernorm"),
            mlp=MLP.load(weights, "pre_feedforward_layernorm"),
            mlp_end=load_norm(weights, "post_feedforward_layernorm"),
            activation=weights.config.activation,
        )

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        attention, mlp, ops = self.attention, self.mlp, self.attention.ops
        qkv = ops.norm_linear(stream, attention.norm, attention.qkv)
        found = attention.output(ops.attention(qkv, attention.spec, attention.rope, kv, batch))
        ops.add(stream, ops.normed(Stream(found), self.attention_end))
        halves = ops.norm_linear(stream, mlp.norm, mlp.gate_up)
        found = mlp.down(ops.gated(halves, self.activation))
        ops.add(stream, ops.normed(Stream(found), self.mlp_end))


def layer(weights: Weights, rope: Rope, index: int) -> GemmaLayer:
    return GemmaLayer.of(weights, Attention.load(weights, attention_spec(weights, index), rope))


load = decoder_of(layer)
