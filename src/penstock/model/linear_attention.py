"""Linear attention as a layer: a gated DeltaNet, and attention whose output has a gate. `ModelConfig` says which layer
is which; the computation is the operations' affair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.core.model_config import LinearAttention
from penstock.model.batch import Batch
from penstock.model.layers import MLP, attention_spec, kv_heads, load_norm, query_heads
from penstock.model.ops import AttentionSpec, DeltaSpec, LayerKV, Linear, Norm, Ops, Rope, Stream
from penstock.model.quantized import Weight
from penstock.model.rope import paired_rows
from penstock.model.shard import Axis, Split
from penstock.model.sparse import SparseMLP
from penstock.model.weights import Outputs, Weights


def key_heads(linear: LinearAttention, each: int) -> Axis:
    """Outputs of so many numbers for each head of keys: what it serves goes where it goes."""
    return Axis(linear.num_key_heads * each, each)


def rows_of(weight: Weight, ids: Tensor) -> Weight:
    return weight[ids.to(weight.device)] if isinstance(weight, Tensor) else weight.rows(ids)


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    ops: Ops
    norm: Norm
    inputs: Linear  # queries, keys, values, and the gates of what comes out
    ba: Linear
    output: Linear
    spec: DeltaSpec

    def __call__(self, stream: Stream, batch: Batch) -> None:
        x = self.ops.normed(stream, self.norm)
        found = self.ops.delta_rule(self.inputs(x), self.ba(x), self.spec, batch)
        self.ops.add_linear(stream, found, self.output)


def load_delta_net(layer: Weights, inputs: Linear, ba: Linear) -> GatedDeltaNet:
    """`inputs` and `ba`: as families have them in their files."""
    config, weights, linear = layer.config, layer.at("linear_attn"), layer.config.linear
    assert linear is not None
    span = layer.shard.span(key_heads(linear, 1), "linear attention")
    served, num_heads = linear.num_value_heads // linear.num_key_heads, len(span)
    first, last = span.start * served, span.stop * served

    def own(name: str) -> Tensor:
        return weights.tensor(name, linear.num_value_heads).float()[first:last].contiguous()

    spec = DeltaSpec(
        place=_place(layer),
        num_key_heads=num_heads,
        num_value_heads=num_heads * served,
        key_dim=linear.key_dim,
        value_dim=linear.value_dim,
        conv=_convolution(weights, linear, span),
        decay=own("A_log").exp(),
        dt_bias=own("dt_bias"),
        norm=Norm(weights.vector("norm.weight", linear.value_dim).float(), config.norm_eps),
    )
    output = weights.linear(
        {"out_proj": config.hidden_size},
        key_heads(linear, served * linear.value_dim),
        split=Split.ROWS,
        precise=weights.is_end_layer,
    )
    return GatedDeltaNet(layer.ops, load_norm(layer, "input_layernorm"), inputs, ba, output, spec)


def _place(layer: Weights) -> int:
    config = layer.config
    return sum(config.is_linear(each) for each in layer.stage.of(config.num_layers) if each < layer.layer)


def _convolution(weights: Weights, linear: LinearAttention, span: range) -> Tensor:
    """This rank's channels: of its heads of queries and keys, and of the value heads that these serve."""
    whole = weights.tensor("conv1d.weight", linear.num_channels, 1, linear.kernel_size).float().squeeze(1)
    keys, values = linear.keys_size, linear.values_size
    parts = []
    for begin, size in ((0, keys), (keys, keys), (2 * keys, values)):
        each = size // linear.num_key_heads
        parts.append(whole[begin + span.start * each : begin + span.stop * each])
    return torch.cat(parts).T.contiguous()


def ordered_linear(weights: Weights, outputs: Outputs, inputs: int, order: Tensor, *, bias: bool = False) -> Linear:
    """A linear that is split by columns and yields its outputs in another order than the file's."""

    def made() -> Linear:
        biases = weights.bias(outputs, inputs, split=Split.COLUMNS) if bias else None
        weight = rows_of(weights.weight(outputs, inputs, split=Split.COLUMNS), order)
        return weights.ops.linear(weight, None if biases is None else biases[order.to(biases.device)])

    linear = made() if weights.packed is None else weights.packed.linear(weights.prefix + "+".join(outputs), made)
    weights.note(linear, outputs, inputs, split=Split.COLUMNS, order=order)
    return linear


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Attention; what its heads find is multiplied by the sigmoid of a gate that is projected beside the queries."""

    ops: Ops
    norm: Norm
    inputs: Linear  # queries, gates, keys, values
    output: Linear
    spec: AttentionSpec
    rope: Rope

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        size = self.spec.num_heads * self.spec.head_dim
        made = self.ops.norm_linear(stream, self.norm, self.inputs)
        qkv, gates = torch.cat((made[:, :size], made[:, 2 * size :]), dim=1), made[:, size : 2 * size]
        found = self.ops.attention(qkv, self.spec, self.rope, kv, batch)
        self.ops.add_linear(stream, self.ops.gate(found, gates), self.output)


def load_gated_attention(layer: Weights, rope: Rope, index: int) -> GatedAttention:
    config, weights = layer.config, layer.at("self_attn")
    spec = attention_spec(layer, index)
    turned = paired_rows(config.head_dim, config.rotary_dim or config.head_dim)
    queries, keys = query_heads(config), kv_heads(config)
    both = Axis(2 * queries.size, 2 * queries.unit, group=queries.group, are_heads=True)
    q_norm, k_norm = (weights.norm(f"{each}_norm.weight", config.head_dim) for each in "qk")
    order = turned.to(q_norm.device)
    return GatedAttention(
        ops=layer.ops,
        norm=load_norm(layer, "input_layernorm"),
        inputs=ordered_linear(
            weights,
            {"q_proj": both, "k_proj": keys, "v_proj": keys},
            config.hidden_size,
            _gated_order(spec, turned),
            bias=config.attention_bias,
        ),
        output=weights.linear(
            {"o_proj": config.hidden_size},
            queries,
            split=Split.ROWS,
            bias=config.output_bias,
            precise=weights.is_end_layer,
        ),
        spec=replace(spec, q_norm=q_norm[order], k_norm=k_norm[order], norm_eps=config.norm_eps),
        rope=rope,
    )


def _gated_order(spec: AttentionSpec, turned: Tensor) -> Tensor:
    """Order of the rows: the file has each head's queries beside its gates, and here all queries are before all gates.
    Dimensions of queries and keys that are rotated together lie half a head apart."""
    dim, heads, keys = spec.head_dim, spec.num_heads, spec.num_kv_heads
    queries = torch.arange(2 * heads * dim).view(heads, 2, dim)
    rest = 2 * heads * dim + torch.arange(2 * keys * dim).view(2, keys, dim)
    parts = (queries[:, 0][:, turned], queries[:, 1], rest[0][:, turned], rest[1])
    return torch.cat([part.flatten() for part in parts])


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """Attention of one kind or the other, then an MLP or experts."""

    mixer: GatedDeltaNet | GatedAttention
    mlp: MLP | SparseMLP
    parts: None = None

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        if isinstance(self.mixer, GatedDeltaNet):
            self.mixer(stream, batch)
        else:
            self.mixer(stream, kv, batch)
        if isinstance(self.mlp, MLP):
            self.mlp(stream)
        else:
            self.mlp(stream, batch)


LoadDeltaNet = Callable[[Weights], GatedDeltaNet]


def hybrid_layer(weights: Weights, rope: Rope, index: int, load_linear: LoadDeltaNet) -> HybridLayer:
    config = weights.config
    mixer = load_linear(weights) if config.is_linear(index) else load_gated_attention(weights, rope, index)
    return HybridLayer(mixer, SparseMLP.load(weights) if config.has_experts(index) else MLP.load(weights))
