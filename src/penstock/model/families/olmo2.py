"""OLMo 2 and 3: attention and MLP are given the stream as it is, and what they give is normed before it is added;
queries and keys are normed over all heads. In OLMo 3 three of four layers see a window, and their rotation is not
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
    heads: HeadNorms
    spec: AttentionSpec
    rope: Rope
    output: Linear
    attention_end: Norm
    gate_up: Linear
    down: Linear
    mlp_end: Norm
    parts: None = None

    @classmethod
    def load(cls, weights: Weights, rope: Rope, index: int) -> OlmoLayer:
        config, inner, mlp = weights.config, weights.at("self_attn"), weights.at("mlp")
        hidden, ffn, is_end = config.hidden_size, config.intermediate_size, weights.is_end_layer
        queries, keys = query_heads(config), kv_heads(config)
        return cls(
            ops=weights.ops,
            qkv=inner.linear({"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, split=Split.COLUMNS),
            heads=HeadNorms.load(inner),
            spec=attention_spec(weights, index),
            rope=rope,
            output=inner.linear({"o_proj": hidden}, queries, split=Split.ROWS, precise=is_end),
            attention_end=load_norm(weights, "post_attention_layernorm"),
            gate_up=mlp.linear({"gate_proj": ffn, "up_proj": ffn}, hidden, split=Split.COLUMNS, precise=is_end),
            down=mlp.linear({"down_proj": hidden}, ffn, split=Split.ROWS),
            mlp_end=load_norm(weights, "post_feedforward_layernorm"),
        )

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        ops = self.ops
        qkv = self.heads(self.qkv(_settled(stream)))
        found = self.output(ops.attention(qkv, self.spec, self.rope, kv, batch))
        ops.add(stream, ops.normed(Stream(found), self.attention_end))
        found = self.down(ops.gated(self.gate_up(_settled(stream)), "silu"))
        ops.add(stream, ops.normed(Stream(found), self.mlp_end))


def _settled(stream: Stream) -> Tensor:
    """The stream itself, with all that was added to it."""
    stream.residual, stream.pending = stream.total(), None
    return stream.residual


load = decoder_of(OlmoLayer.load)
