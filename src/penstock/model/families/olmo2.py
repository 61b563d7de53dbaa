"""OLMo 2 and 3: attention and MLP are given the stream as it is, and what they give is normed before it is added;
queries and keys are normed over all heads. Three of four layers of OLMo 3 see a window, and their rotation is not
stretched."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.layers import attention_spec, decoder_of, kv_heads, load_norm, query_heads
from penstock.model.ops import AttentionSpec, LayerKV, Linear, Norm, Ops, Rope, Stream
from penstock.model.shard import Split
from penstock.model.weights import Weights
from penstock.model.whole_norm import HeadNorms


@dataclass(frozen=True, slots=True)
class OlmoLayer:
    ops: Ops
    qkv: Linear
    heads: HeadNorms | None  # None: kernels norm each head
    spec: AttentionSpec
    rope: Rope
    output: Linear
    attention_end: Norm
    gate_up: Linear
    down: Linear
    mlp_end: Norm
    parts: None = None

    @classmethod
    def load(cls, weights: Weights, rope: Rope, spec: AttentionSpec, heads: HeadNorms | None = None) -> OlmoLayer:
        config, inner, mlp = weights.config, weights.at("self_attn"), weights.at("mlp")
        hidden, ffn, is_end = config.hidden_size, config.intermediate_size, weights.is_end_layer
        queries, keys = query_heads(config), kv_heads(config)
        return cls(
            ops=weights.ops,
            qkv=inner.linear({"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, split=Split.COLUMNS),
            heads=heads,
            spec=spec,
            rope=rope,
            output=inner.linear({"o_proj": hidden}, queries, split=Split.ROWS, precise=is_end),
            attention_end=load_norm(weights, "post_attention_layernorm"),
            gate_up=mlp.linear({"gate_proj": ffn, "up_proj": ffn}, hidden, split=Split.COLUMNS, precise=is_end),
            down=mlp.linear({"down_proj": hidden}, ffn, split=Split.ROWS),
            mlp_end=load_norm(weights, "post_feedforward_layernorm"),
        )

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        ops = self.ops
        qkv = self.qkv(_settled(stream))
        if self.heads is not None:
            qkv = self.heads(qkv)
        found = self.output(ops.attention(qkv, self.spec, self.rope, kv, batch))
        ops.add(stream, ops.normed(Stream(found), self.attention_end))
        found = self.down(ops.gated(self.gate_up(_settled(stream)), "silu"))
        ops.add(stream, ops.normed(Stream(found), self.mlp_end))


def _settled(stream: Stream) -> Tensor:
    """The stream itself, with all that was added to it."""
    stream.residual, stream.pending = stream.total(), None
    return stream.residual


def layer(weights: Weights, rope: Rope, index: int) -> OlmoLayer:
    return OlmoLayer.load(weights, rope, attention_spec(weights, index), HeadNorms.load(weights.at("self_attn")))


load = decoder_of(layer)
