"""A mixture of experts: a router gives each token a few of a layer's experts, and weighs what they make of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.model_config import Experts
from penstock.hub.families import FAMILY_FILES
from penstock.model.batch import Batch
from penstock.model.layers import Attention, load_norm
from penstock.model.ops import ExpertLinears, LayerKV, Linear, Norm, Ops, Stream
from penstock.model.ops.experts import ELSEWHERE
from penstock.model.quantized import Weight
from penstock.model.ranks import Ranks
from penstock.model.shard import Axis, Split
from penstock.model.weights import Weights


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """One that every token passes, weighed by a gate of its own."""

    ops: Ops
    gate: Linear  # one output
    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, weights: Weights, config: Experts, hidden: int) -> SharedExpert:
        width, inner = config.shared_intermediate_size, weights.at("shared_expert")
        return cls(
            ops=weights.ops,
            gate=weights.ops.linear(weights.tensor("shared_expert_gate.weight", 1, hidden)),
            gate_up=inner.linear(
                {"gate_proj": width, "up_proj": width}, hidden, split=Split.COLUMNS, precise=weights.is_end_layer
            ),
            down=inner.linear({"down_proj": hidden}, width, split=Split.ROWS, is_summed=False),
        )

    def beside(self, x: Tensor, found: Tensor) -> Tensor:
        """What the other experts found, and what this one makes of x."""
        made = self.down(self.ops.gated(self.gate_up(x), "silu"))
        return self.ops.add_shared(found, made, self.gate(x))


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
    own: range | None = None  # experts that this rank has, where whole ones are shared out; None: of all, a part or all

    @classmethod
    def load(cls, layer: Weights) -> SparseMLP:
        config, names = layer.config.experts, FAMILY_FILES[layer.config.architecture].experts
        assert config is not None
        assert names is not None
        hidden, ffn, block = layer.config.hidden_size, config.intermediate_size, layer.at(names.block)
        shares = layer.shares_experts and layer.shard.size > 1
        own = layer.shard.span(Axis(config.count, group=1), "the experts") if shares else range(config.count)
        columns, rows = (Split.NONE, Split.NONE) if shares else (Split.COLUMNS, Split.ROWS)

        def pairs() -> Iterator[tuple[Weight, Weight]]:
            for expert in own:
                inner = block.at(f"experts.{expert}")
                yield (
                    inner.weight({names.gate: ffn, names.up: ffn}, hidden, split=columns),
                    inner.weight({names.down: hidden}, ffn, split=rows),
                )

        return cls(
            ops=layer.ops,
            norm=load_norm(layer, "post_attention_layernorm"),
            # Never quantized: it is small, and who is chosen may hang on its last bits.
            router=layer.ops.linear(block.tensor("gate.weight", config.count, hidden)),
            experts=layer.ops.experts(len(own), pairs(), is_part=shares),
            shared=SharedExpert.load(block, config, hidden) if config.shared_intermediate_size else None,
            per_token=config.per_token,
            normalized=config.normalized,
            ranks=layer.ranks if layer.shard.size > 1 else None,
            own=own if shares else None,
        )

    def __call__(self, stream: Stream) -> None:
        x = self.ops.normed(stream, self.norm)
        ids, weights = self.ops.route(self.router(x), self.per_token, normalized=self.normalized)
        if self.own is not None:
            ids, weights = _here(ids, weights, self.own)
        found = self.experts(x, ids, weights)
        if self.shared is not None:
            found = self.shared.beside(x, found)
        self.ops.add(stream, found if self.ranks is None else self.ranks.sum(found))


def _here(ids: Tensor, weights: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """Choices as the rank that has these experts sees them: by its own numbers, and others are elsewhere."""
    is_here = (ids >= own.start) & (ids < own.stop)
    return torch.where(is_here, ids - own.start, ELSEWHERE), weights * is_here


@dataclass(frozen=True, slots=True)
class SparseLayer:
    attention: Attention
    mlp: SparseMLP
    parts: None = None

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        self.attention(stream, kv, batch)
        self.mlp(stream)
