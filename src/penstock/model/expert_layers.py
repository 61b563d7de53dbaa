"""Experts of all layers as one rank has them: how many tokens each was given, and how its slots get other experts.

Layers look experts up by themselves (`ops.experts.ExpertMap`); what is here is for whoever counts and moves them,
between steps. It knows no other rank: all are told the same placements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from penstock.core.expert_placement import ExpertPlacement, ExpertSharing, num_slots
from penstock.core.model_config import Activation
from penstock.model.ops import ExpertLinears, ExpertWeights, Ops
from penstock.model.ops.experts import ELSEWHERE, ExpertMap
from penstock.model.shard import Shard

ReadExpert = Callable[[int], ExpertWeights]  # from the model's files


@dataclass(eq=False)
class LayerExperts:
    """The experts of one layer that a rank has."""

    layer: int
    map: ExpertMap
    linears: ExpertLinears
    placement: ExpertPlacement
    rank: int
    read: ReadExpert

    @torch.inference_mode()
    def place(self, wanted: ExpertPlacement) -> int:
        """Have these experts from the next step on. Returns how many were read from the model's files."""
        before, now = self.placement.ranks[self.rank], wanted.after(self.placement)
        own = now.ranks[self.rank]
        changed = [slot for slot, expert in enumerate(own) if before[slot : slot + 1] != (expert,)]
        for slot in changed:
            self.linears.put(slot, self.read(own[slot]))
        self.placement = now
        if self.map.places is not None:
            self.map.places.copy_(places_of(now, self.rank, *self.map.counts.shape))
        return len(changed)


@dataclass(eq=False)
class ExpertLayers:
    """All layers of a model, or of a stage, that have experts. `counts` is written by every step."""

    counts: Tensor  # [layers of the model, experts, copies] int64, on the device
    sharing: ExpertSharing | None  # None: every rank has all experts, or a part of each
    shard: Shard
    layers: dict[int, LayerExperts] = field(default_factory=dict)  # where whole experts are shared out
    counted: set[int] = field(default_factory=set)  # layers that have experts here

    @classmethod
    def of(
        cls, ops: Ops, shard: Shard, num_layers: int, num_experts: int, sharing: ExpertSharing | None
    ) -> ExpertLayers:
        sharing = sharing if shard.size > 1 else None
        copies = shard.size if sharing is not None and sharing.redundant else 1
        counts = torch.zeros(num_layers, num_experts, copies, dtype=torch.int64, device=ops.device)
        return cls(counts, sharing, shard)

    def load(
        self, layer: int, ops: Ops, read: ReadExpert, activation: Activation = "silu"
    ) -> tuple[ExpertLinears, ExpertMap]:
        """The experts of one layer, and where they are found."""
        self.counted.add(layer)
        counts, sharing, rank = self.counts[layer], self.sharing, self.shard.rank
        num_experts = len(counts)
        if sharing is None:
            return ops.experts(num_experts, map(read, range(num_experts)), activation=activation), ExpertMap(counts)
        placement = sharing.placement(layer, num_experts, self.shard.size)
        slots = num_slots(num_experts, self.shard.size, sharing.redundant)[rank]
        own = map(read, placement.ranks[rank])
        linears = ops.experts(slots, own, is_part=True, activation=activation)
        found = ExpertMap(counts, places_of(placement, rank, *counts.shape).to(ops.device))
        self.layers[layer] = LayerExperts(layer, found, linears, placement, rank, read)
        return linears, found

    def placement(self, layer: int) -> ExpertPlacement | None:
        """Placement in a layer that this rank has; None: every rank has all experts, or a part of each."""
        return self.layers[layer].placement if layer in self.layers else None

    @property
    def digest(self) -> str:
        """A digest of the placements that ranks begin with: all of them must have the same. "": there are none."""
        if self.sharing is None:
            return ""
        loads = sorted((layer, tuple(counts)) for layer, counts in self.sharing.counts.items())
        return hashlib.sha256(repr((self.sharing.redundant, loads)).encode()).hexdigest()[:16]

    @cached_property
    def changing(self) -> list[Tensor]:
        """Tensors that are no weights: they differ from step to step, or from one placement to the next."""
        return [self.counts, *(each.map.places for each in self.layers.values() if each.map.places is not None)]


def places_of(placement: ExpertPlacement, rank: int, num_experts: int, num_copies: int) -> Tensor:
    """See `ExpertMap.places`."""
    found = torch.full((num_experts, 1 + num_copies), ELSEWHERE, dtype=torch.int32)
    for expert, copies in placement.copies.items():
        found[expert, 0] = len(copies)
        for place, (where, slot) in enumerate(copies, 1):
            if where == rank:
                found[expert, place] = slot
    return found
