"""GLM-4 (dense): half of each head is rotated, by neighbours; gate and up are one tensor. The outputs of attention and
MLP are normed before they are added since GLM-4-0414, as in Gemma 2."""

from __future__ import annotations

from penstock.model.families.gemma2 import GemmaLayer
from penstock.model.layers import MLP, Attention, DecoderLayer, attention_spec, decoder_of, load_norm
from penstock.model.ops import Rope
from penstock.model.ordered import ordered_attention
from penstock.model.weights import Weights


def glm_layer(weights: Weights, rope: Rope, index: int) -> DecoderLayer:
    return DecoderLayer(_attention(weights, rope, index), MLP.load(weights, is_joined=True))


def layer(weights: Weights, rope: Rope, index: int) -> GemmaLayer:
    return GemmaLayer(
        attention=_attention(weights, rope, index),
        attention_end=load_norm(weights, "post_self_attn_layernorm"),
        mlp=MLP.load(weights, is_joined=True),
        mlp_end=load_norm(weights, "post_mlp_layernorm"),
        activation=weights.config.activation,
        mlp_norm="post_attention_layernorm",
    )


def _attention(weights: Weights, rope: Rope, index: int) -> Attention:
    spec = attention_spec(weights, index)
    return ordered_attention(weights, spec, rope, neighbours=True, bias=weights.config.attention_bias)


load_glm = decoder_of(glm_layer)
load = decoder_of(layer)
