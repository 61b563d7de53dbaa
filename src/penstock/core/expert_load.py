"""Expert load: how many tokens the router of each layer gave to each expert, and to each rank that has some.

Engines report it, servers export it, and a file of it says at the next start which experts are hot (`expert_counts`).
"""

from __future__ import annotations

from msgspec import Struct

from penstock.core.expert_placement import imbalance_of


class LayerLoad(Struct, frozen=True):
    """A token counts once for each expert that it was given to."""

    counts: list[int]  # by expert, since the engine's start
    ranks: list[list[int]] = []  # experts of each rank now; []: every rank has all experts, or a part of each
    rank_tokens: list[int] = []  # by rank, since the engine's start
    first_rank: int = 0  # of the layer's pipeline stage


class ExpertLoad(Struct, frozen=True):
    layers: dict[int, LayerLoad] = {}

    def since(self, before: ExpertLoad) -> ExpertLoad:
        """The tokens since an earlier reading of the same engine."""
        return ExpertLoad({layer: _since(now, before.layers.get(layer)) for layer, now in self.layers.items()})

    @property
    def num_tokens(self) -> int:
        return sum(sum(layer.counts) for layer in self.layers.values())

    @property
    def expert_imbalance(self) -> float:
        """The busiest expert's tokens by the mean of its layer."""
        return imbalance_of([layer.counts for layer in self.layers.values()])

    @property
    def rank_imbalance(self) -> float:
        """The busiest rank's tokens by the mean of all that share a layer; 1 where none has whole experts."""
        return imbalance_of([layer.rank_tokens for layer in self.layers.values() if layer.rank_tokens])

    @property
    def tokens_by_rank(self) -> dict[int, int]:
        """Tokens of each rank, where whole experts are shared out."""
        found: dict[int, int] = {}
        for layer in self.layers.values():
            for rank, tokens in enumerate(layer.rank_tokens, layer.first_rank):
                found[rank] = found.get(rank, 0) + tokens
        return found


def _since(now: LayerLoad, before: LayerLoad | None) -> LayerLoad:
    if before is None:
        return now
    counts = [new - old for new, old in zip(now.counts, before.counts, strict=True)]
    tokens = [new - old for new, old in zip(now.rank_tokens, before.rank_tokens, strict=True)]
    return LayerLoad(counts, now.ranks, tokens, now.first_rank)
