"""A mixture of experts: a router gives each token a few of a layer's experts, and weighs what they make of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.core.model_config import Experts
from penstock.hub.families import FAMILY_FILES, ExpertNames
from penstock.model.batch import Batch
from penstock.model.expert_layers import ExpertLayers
from penstock.model.layers import Attention, load_norm
from penstock.model.ops import Choose, ExpertLinears, ExpertWeights, LayerKV, Linear, Norm, Ops, Stream
from penstock.model.ops.experts import ExpertMap
from penstock.model.ranks import Ranks
from penstock.model.routing import GroupedChoice
from penstock.model.shard import Split
from penstock.model.weights import Weights


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A shared expert: every token passes it. Its result is weighted by a gate of its own, or added as it is."""

    ops: Ops
    gate: Linear | None  # one output; None: there is none
    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, weights: Weights, config: Experts, hidden: int, name: str = "shared_expert") -> SharedExpert:
        width, inner = config.shared_intermediate_size, weights.at(name)
        return cls(
            ops=weights.ops,
            gate=weights.ops.linear(weights.tensor(f"{name}_gate.weight", 1, hidden)) if config.shared_gate else None,
            gate_up=inner.linear(
                {"gate_proj": width, "up_proj": width}, hidden, split=Split.COLUMNS, precise=weights.is_end_layer
            ),
            down=inner.linear({"down_proj": hidden}, width, split=Split.ROWS, is_summed=False),
        )

    def beside(self, x: Tensor, found: Tensor) -> Tensor:
        """Sum of what the other experts found and what this one makes of x."""
        made = self.down(self.ops.gated(self.gate_up(x), "silu"))
        return found + made if self.gate is None else self.ops.add_shared(found, made, self.gate(x))


@dataclass(frozen=True, slots=True)
class SparseMLP:
    ops: Ops
    norm: Norm
    router: Linear
    experts: ExpertLinears
    shared: SharedExpert | None
    per_token: int
    normalized: bool
    ranks: Ranks | None = None  # those whose parts of each expert are summed, of all experts at once; None: one has all
    map: ExpertMap | None = None  # where experts are looked up and counted; None: all are here, and nobody counts
    choose: Choose | None = None  # how experts are chosen; None: by the largest logits

    @classmethod
    def load(cls, layer: Weights) -> SparseMLP:
        config, names = layer.config.experts, FAMILY_FILES[layer.config.architecture].experts
        assert config is not None
        assert names is not None
        hidden, ffn, block = layer.config.hidden_size, config.intermediate_size, layer.at(names.block)
        layers = layer.experts or ExpertLayers.of(layer.ops, layer.shard, layer.config.num_layers, config.count, None)
        is_whole = layers.sharing is not None
        columns, rows = (Split.NONE, Split.NONE) if is_whole else (Split.COLUMNS, Split.ROWS)

        def read(expert: int) -> ExpertWeights:
            inner = block.at(f"experts.{expert}")
            gate_up, down = {names.gate: ffn, names.up: ffn}, {names.down: hidden}
            return ExpertWeights(
                inner.weight(gate_up, hidden, split=columns),
                inner.weight(down, ffn, split=rows),
                inner.bias(gate_up, hidden, split=columns) if config.has_biases else None,
                inner.bias(down, ffn, split=rows) if config.has_biases else None,
            )

        experts, found = layers.load(layer.layer, layer.ops, read, config.activation)
        bias = block.tensor(f"{names.router}.bias", config.count) if config.has_biases else None
        return cls(
            ops=layer.ops,
            norm=load_norm(layer, "post_attention_layernorm"),
            # Never quantized: it is small, and who is chosen may hang on its last bits.
            router=layer.ops.linear(block.tensor(f"{names.router}.weight", config.count, hidden), bias),
            experts=experts,
            shared=SharedExpert.load(block, config, hidden, names.shared) if config.shared_intermediate_size else None,
            per_token=config.per_token,
            normalized=config.normalized,
            ranks=layer.ranks if layer.shard.size > 1 else None,
            map=found,
            choose=_choice(block, names, config) if config.routing is not None else None,
        )

    def __call__(self, stream: Stream, batch: Batch | None = None) -> None:
        """`batch`: of the stream's tokens; None: nobody looks experts up by them."""
        x = self.ops.normed(stream, self.norm)
        logits = self.router(x)
        ids, weights = self.ops.route(
            logits, self.per_token, normalized=self.normalized, experts=self.map, batch=batch, choose=self.choose
        )
        found = self.experts(x, ids, weights)
        if self.shared is not None:
            found = self.shared.beside(x, found)
        self.ops.add(stream, found if self.ranks is None else self.ranks.sum(found))


def _choice(block: Weights, names: ExpertNames, config: Experts) -> Choose:
    assert config.routing is not None
    bias = None
    if config.routing.has_bias:
        bias = block.tensor(names.choice_bias, config.count).float()
    return GroupedChoice(config.routing, config.normalized, bias)


@dataclass(frozen=True, slots=True)
class SparseLayer:
    attention: Attention
    mlp: SparseMLP
    parts: None = None

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        self.attention(stream, kv, batch)
        self.mlp(stream, batch)
