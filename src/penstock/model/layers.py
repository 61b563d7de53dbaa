"""The layers that the families share: attention, feed-forward, and the decoder around them.

Each is plain data that can be called, built by its `load` from the weights below one prefix. A family that
needs another kind of layer brings its own; nothing here is switched by a family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.model.batch import Batch
from penstock.model.mrope import Mrope, apply_mrope
from penstock.model.ops import AttentionSpec, Layer, LayerKV, LayerParts, Linear, Norm, Ops, Rope, Stream
from penstock.model.quantized import Weight
from penstock.model.ranks import gathered_head, split_embedding
from penstock.model.rope import layer_ropes
from penstock.model.sequence import SequenceGroup
from penstock.model.shard import Axis, Split
from penstock.model.stages import Link
from penstock.model.weights import Outputs, Weights

# Threads that load layers: dequantizing one overlaps packing another. Each costs a layer's float32 memory meanwhile.
LOADERS = 2
_EMBEDDING = "model.embed_tokens"

Progress = Callable[[int, int], None]  # (layers loaded, layers in all)


class CausalLM(Protocol):
    @property
    def config(self) -> ModelConfig:
        """The whole model's, also where this is one rank's part of it."""

    @property
    def spec(self) -> AttentionSpec:
        """The attention of its first layer: heads are as many in all, and those of this rank."""

    def __call__(self, batch: Batch, kv: Sequence[LayerKV]) -> Tensor:
        """Run one step: the cache is extended by the batch's tokens; logits [rows, vocab] of its logit rows."""


LayerLoader = Callable[[Weights, Rope, int], Layer]
Family = Callable[[Weights, Progress], CausalLM]


def query_heads(config: ModelConfig) -> Axis:
    group = config.num_heads // config.num_kv_heads
    return Axis(config.num_heads * config.head_dim, config.head_dim, group=group, are_heads=True)


def kv_heads(config: ModelConfig) -> Axis:
    return Axis(config.num_kv_heads * config.head_dim, config.head_dim, repeats=True, group=1, are_heads=True)


def attention_spec(weights: Weights, layer: int) -> AttentionSpec:
    config, shard = weights.config, weights.shard
    return AttentionSpec(
        num_heads=shard.num_units(query_heads(config), "attention"),
        num_kv_heads=shard.num_units(kv_heads(config), "the attention's keys and values"),
        head_dim=config.head_dim,
        scale=config.query_scale or config.head_dim**-0.5,
        window=config.window(layer),
        in_chunks=config.in_chunks,
        cap=config.attention_cap,
        sequence=SequenceGroup(weights.ranks) if shard.sp > 1 else None,
        value_dim=config.cached_value_dim,
    )


def load_norm(weights: Weights, path: str) -> Norm:
    """A norm of the stream."""
    return Norm(weights.norm(f"{path}.weight", weights.config.hidden_size), weights.config.stream_eps)


@dataclass(frozen=True, slots=True)
class Attention:
    ops: Ops
    norm: Norm
    qkv: Linear
    output: Linear
    spec: AttentionSpec
    rope: Rope

    @classmethod
    def load(cls, layer: Weights, spec: AttentionSpec, rope: Rope, *, qkv_bias: bool = False) -> Attention:
        config, weights = layer.config, layer.at("self_attn")
        queries, keys = query_heads(config), kv_heads(config)
        return cls(
            ops=weights.ops,
            norm=load_norm(layer, "input_layernorm"),
            qkv=weights.linear(
                {"q_proj": queries, "k_proj": keys, "v_proj": keys},
                config.hidden_size,
                split=Split.COLUMNS,
                bias=qkv_bias,
            ),
            output=weights.linear(
                {"o_proj": config.hidden_size},
                queries,
                split=Split.ROWS,
                bias=config.output_bias,
                precise=weights.is_end_layer,
            ),
            spec=spec,
            rope=rope,
        )

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        qkv = self.ops.norm_linear(stream, self.norm, self.qkv)
        self.ops.add_linear(stream, self.ops.attention(qkv, self.spec, self.rope, kv, batch), self.output)


@dataclass(frozen=True, slots=True)
class MLP:
    ops: Ops
    norm: Norm
    gate_up: Linear
    down: Linear

    @classmethod
    def load(
        cls, layer: Weights, norm: str = "post_attention_layernorm", block: str = "mlp", *, is_joined: bool = False
    ) -> MLP:
        """`is_joined`: files have gate and up as one tensor."""
        weights = layer.at(block)
        hidden, ffn = weights.config.hidden_size, weights.config.intermediate_size
        made_of: Outputs = {"gate_up_proj": (Axis(ffn), Axis(ffn))} if is_joined else {"gate_proj": ffn, "up_proj": ffn}
        return cls(
            ops=weights.ops,
            norm=load_norm(layer, norm),
            gate_up=weights.linear(made_of, hidden, split=Split.COLUMNS, precise=weights.is_end_layer),
            down=weights.linear({"down_proj": hidden}, ffn, split=Split.ROWS),
        )

    def __call__(self, stream: Stream) -> None:
        self.ops.feed_forward(stream, self.norm, self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class MropeAttention:
    """Attention whose queries and keys are normed and rotated before it: its own rotation turns nothing."""

    attention: Attention

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        own, ops = self.attention, self.attention.ops
        qkv = apply_mrope(ops.norm_linear(stream, own.norm, own.qkv), own.spec, batch)
        spec = replace(own.spec, q_norm=None, k_norm=None)
        ops.add_linear(stream, ops.attention(qkv, spec, own.rope, kv, batch), own.output)


@dataclass(frozen=True, slots=True)
class MropeLayer:
    attention: MropeAttention
    mlp: MLP
    level: int = 0  # of what an image's encoder made, what is added behind this layer; 0: nothing (deepstack)

    @property
    def parts(self) -> None:
        return None

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        self.attention(stream, kv, batch)
        self.mlp(stream)
        if self.level and batch.images is not None:
            total = stream.total()
            level = batch.images.level(self.level, total.shape[1])
            stream.residual = total.index_add(0, batch.images.rows, level.to(total.dtype))
            stream.pending = None


def mrope_layer(attention: Attention, mlp: MLP, index: int, config: ModelConfig) -> MropeLayer:
    levels = config.vision.levels if config.vision is not None else 1
    return MropeLayer(MropeAttention(attention), mlp, index + 1 if index + 1 < levels else 0)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention: Attention
    mlp: MLP

    @property
    def parts(self) -> LayerParts:
        attention, mlp = self.attention, self.mlp
        return LayerParts(
            attention_norm=attention.norm,
            qkv=attention.qkv,
            spec=attention.spec,
            rope=attention.rope,
            output=attention.output,
            mlp_norm=mlp.norm,
            gate_up=mlp.gate_up,
            down=mlp.down,
        )

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        self.attention(stream, kv, batch)
        self.mlp(stream)


@dataclass(frozen=True, slots=True)
class Decoder:
    config: ModelConfig
    spec: AttentionSpec
    ops: Ops
    embedding: Linear
    layers: list[Layer]
    norm: Norm
    head: Linear
    after: Link | None = None  # the next stage of a pipeline, which makes the logits; None: this one does
    mrope: Mrope | None = None  # of layers whose rotation does not follow from positions alone
    stage_layers: range = range(0)  # their numbers in the whole model

    @classmethod
    def load(cls, weights: Weights, load_layer: LayerLoader, progress: Progress) -> Decoder:
        config = weights.config
        embedding, head = _embedding_and_head(weights)
        return cls(
            config=config,
            spec=attention_spec(weights, weights.stage.of(config.num_layers).start),
            ops=weights.ops,
            embedding=embedding,
            layers=_load_layers(weights, load_layer, progress),
            norm=load_norm(weights, "model.norm"),
            head=head,
            after=weights.stage.after,
            mrope=Mrope.of(config, weights.ops.device),
            stage_layers=weights.stage.of(config.num_layers),
        )

    def __call__(self, batch: Batch, kv: Sequence[LayerKV]) -> Tensor:
        if self.mrope is not None:
            batch = replace(batch, angles=self.mrope(batch))
        self.ops.begin(batch)
        embedded = self.embedding(batch.token_ids)
        if batch.images is not None:
            own = batch.images.level(0, embedded.shape[1])
            embedded.index_copy_(0, batch.images.rows, own.to(embedded.dtype))
        stream = Stream(embedded)
        self.ops.run_layers(self.layers, stream, self.by_layer(kv), batch)
        if self.after is not None:
            self.after.send(stream.total())
            return stream.residual.new_empty(0, self.config.vocab_size)
        return self.logits(stream.at(batch.logit_rows))

    def logits(self, stream: Stream) -> Tensor:
        """[rows, vocab], after the last layer."""
        logits = self.ops.norm_linear(stream, self.norm, self.head)
        if self.config.logit_divisor != 1.0:
            logits = logits / self.config.logit_divisor
        return self.ops.capped(logits, self.config.logit_cap) if self.config.logit_cap else logits

    def by_layer(self, kv: Sequence[LayerKV]) -> Sequence[LayerKV]:
        """The caches of its layers that attend, for all of its layers: a linear one does not look at what it is given,
        and has that of a layer beside it."""
        if self.config.linear is None:
            return kv
        place, found = 0, []
        for layer in self.stage_layers:
            found.append(kv[min(place, len(kv) - 1)])
            place += not self.config.is_linear(layer)
        return found


def decoder_of(load_layer: LayerLoader) -> Family:
    """The family whose models are a plain decoder of such layers."""

    def load(weights: Weights, progress: Progress) -> CausalLM:
        return Decoder.load(weights, load_layer, progress)

    return load


def _embedding_and_head(weights: Weights) -> tuple[Linear, Linear]:
    """Embedding and head. A pipeline's first stage has the embedding, its last the head; a tied table both have."""
    stage, packed = weights.stage, weights.packed
    if weights.config.tied_embeddings and stage.is_alone:

        def tied() -> tuple[Linear, Linear]:
            return weights.ops.tied(_table(weights, _EMBEDDING))

        embedding, head = tied() if packed is None else packed.tied("model.embed_tokens", tied)
    else:  # one after the other: the two are the largest tensors there are
        embedding = weights.ops.embedding(_table(weights, _EMBEDDING)) if stage.before is None else stage.stream_of
        head = _head(weights) if stage.after is None else _elsewhere
    vocab, ranks = weights.config.vocab_size, weights.ranks
    if stage.before is None:
        embedding = _scaled(split_embedding(embedding, vocab, ranks), weights.config, weights.ops)
    return embedding, gathered_head(head, vocab, ranks) if stage.after is None else head


def _table(weights: Weights, name: str) -> Weight:
    return weights.table(f"{name}.weight", weights.config.vocab_size, weights.config.hidden_size)


def _head(weights: Weights) -> Linear:
    name = _EMBEDDING if weights.config.tied_embeddings else "lm_head"

    def made() -> Linear:
        return weights.ops.head(_table(weights, name))

    return made() if weights.packed is None else weights.packed.linear("lm_head", made)


def _elsewhere(x: Tensor) -> Tensor:
    raise AssertionError("the last stage has the head")


def _scaled(embedding: Linear, config: ModelConfig, ops: Ops) -> Linear:
    if config.stream_scale == 1.0:
        return embedding
    rounded = float(torch.tensor(config.embedding_scale, dtype=ops.activation_dtype))  # as it was in training
    scale = rounded / config.residual_scale
    return lambda ids: embedding(ids) * scale


def _load_layers(weights: Weights, load_layer: LayerLoader, progress: Progress) -> list[Layer]:
    num_layers, own = weights.config.num_layers, weights.stage.of(weights.config.num_layers)
    ropes = layer_ropes(weights.config, weights.ops.device, weights.max_context)
    layers = []

    def load(index: int) -> Layer:
        layer = replace(weights.at(f"model.layers.{index}"), layer=index, is_end_layer=index in (0, num_layers - 1))
        return load_layer(layer, ropes(index), index)

    with ThreadPoolExecutor(LOADERS, thread_name_prefix="load-layer") as pool:
        for layer in pool.map(load, own):
            layers.append(layer)
            progress(len(layers), len(own))
    return layers
