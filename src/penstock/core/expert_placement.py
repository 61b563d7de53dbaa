"""Expert placement: which ranks have which experts of a layer, by how many tokens chose each (the idea of EPLB).

Pure policy on counts. A hot expert may have copies, at most one on a rank; its tokens are shared out evenly among them.
It knows no weights and no ranks but by number: `model.sparse` looks experts up by a placement, and `runner.experts`
changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from penstock.core.errors import ConfigError


@dataclass(frozen=True)
class ExpertSharing:
    """Sharing of whole experts among ranks: what the placement of each layer is made from."""

    redundant: int = 0  # slots of each rank beyond its share: for copies
    counts: Mapping[int, Sequence[int]] = field(default_factory=dict)  # by layer; none: plain, each expert once

    def placement(self, layer: int, num_experts: int, num_ranks: int) -> ExpertPlacement:
        counts = self.counts.get(layer)
        if counts is None:
            return plain_placement(num_experts, num_ranks)
        if len(counts) != num_experts:
            raise ConfigError(
                f"expert_counts has {len(counts)} experts for layer {layer}, and the model {num_experts}: it was "
                "recorded with another model",
                param="expert_counts",
            )
        return balanced_placement(counts, num_ranks, self.redundant)


@dataclass(frozen=True)
class ExpertPlacement:
    """Experts of one layer by rank. A rank's slots are in the order of its experts here, and it may have fewer experts
    than slots."""

    ranks: tuple[tuple[int, ...], ...]

    @cached_property
    def copies(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """(rank, slot) of every copy of an expert, in the order of ranks."""
        found: dict[int, list[tuple[int, int]]] = {}
        for rank, experts in enumerate(self.ranks):
            for slot, expert in enumerate(experts):
                found.setdefault(expert, []).append((rank, slot))
        return {expert: tuple(places) for expert, places in sorted(found.items())}

    def rank_loads(self, counts: Sequence[int]) -> list[float]:
        """Tokens of each rank, where copies share those of their expert evenly."""
        loads = [0.0] * len(self.ranks)
        for expert, places in self.copies.items():
            for rank, _ in places:
                loads[rank] += counts[expert] / len(places)
        return loads

    def imbalance(self, counts: Sequence[int]) -> float:
        """The busiest rank's tokens by the mean of all: 1 is even, and also what no tokens are."""
        return imbalance_of([self.rank_loads(counts)])

    def after(self, before: ExpertPlacement) -> ExpertPlacement:
        """The same experts on the same ranks, in slots that leave those in place who stay on their rank."""
        return ExpertPlacement(tuple(map(_in_old_slots, before.ranks, self.ranks)))


def imbalance_of(layers: Sequence[Sequence[float]]) -> float:
    """The busiest by the mean, of loads by layer: layers follow each other, and in each all wait for its busiest."""
    total = sum(sum(loads) / len(loads) for loads in layers)
    return sum(max(loads) for loads in layers) / total if total else 1.0


def num_slots(num_experts: int, num_ranks: int, redundant: int = 0) -> list[int]:
    """Slots of each rank: its share of the experts, and so many more. The last ranks have one more where it does not
    divide, as `Shard` has it."""
    each, more = divmod(num_experts, num_ranks)
    sizes = [each + (rank >= num_ranks - more) + redundant for rank in range(num_ranks)]
    if redundant and max(sizes) > num_experts:
        most = num_experts - each - (more > 0)
        raise ConfigError(
            f"redundant_experts is {redundant}, but with {num_experts} experts on {num_ranks} ranks a rank that has "
            f"{most} more has all of them",
            param="redundant_experts",
        )
    return sizes


def plain_placement(num_experts: int, num_ranks: int) -> ExpertPlacement:
    """Experts in the order of their numbers, each once."""
    sizes = num_slots(num_experts, num_ranks)
    begins = [sum(sizes[:rank]) for rank in range(num_ranks)]
    return ExpertPlacement(tuple(tuple(range(b, b + size)) for b, size in zip(begins, sizes, strict=True)))


def balanced_placement(counts: Sequence[int], num_ranks: int, redundant: int = 0) -> ExpertPlacement:
    """The most even placement that is found for such counts: never less even than the plain one.

    Copies go where an expert's tokens, divided by its copies, are most. Then the busiest copies are placed first, each
    on the rank with the least to do (longest processing time first). All slots are not always of use: fewer copies are
    tried too.
    """
    plain = plain_placement(len(counts), num_ranks)
    sizes = num_slots(len(counts), num_ranks, redundant)
    tried, extra = [plain], sum(sizes) - len(counts)
    while True:
        tried.append(_packed(counts, _num_copies(counts, num_ranks, extra), sizes))
        if not extra:
            break
        extra //= 2
    return min(tried, key=lambda one: (max(one.rank_loads(counts)), one is not plain))


def _num_copies(counts: Sequence[int], num_ranks: int, extra: int) -> list[int]:
    """One for each expert, and so many more for the hottest."""
    copies = [1] * len(counts)
    for _ in range(extra):
        left = [expert for expert, count in enumerate(copies) if count < num_ranks]
        hottest = max(left, key=lambda expert: (counts[expert] / copies[expert], -copies[expert], -expert))
        copies[hottest] += 1
    return copies


def _packed(counts: Sequence[int], copies: Sequence[int], sizes: Sequence[int]) -> ExpertPlacement:
    ranks: list[list[int]] = [[] for _ in sizes]
    loads = [0.0] * len(sizes)
    each = [counts[expert] / copies[expert] for expert in range(len(counts))]

    def idlest(rank: int) -> tuple[float, int, int]:
        return loads[rank], len(ranks[rank]), rank

    for expert in sorted(range(len(counts)), key=lambda expert: (-each[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank, own in enumerate(ranks) if len(own) < sizes[rank]]
            able = [rank for rank in free if expert not in ranks[rank]]
            rank = min(able, key=idlest) if able else _made_room(expert, free[0], ranks, each)
            if not able:  # another expert has moved from here to where there was room
                moved = ranks[free[0]][-1]
                loads[free[0]] += each[moved]
                loads[rank] -= each[moved]
            ranks[rank].append(expert)
            loads[rank] += each[expert]
    return ExpertPlacement(tuple(tuple(sorted(own)) for own in ranks))


def _made_room(expert: int, free: int, ranks: list[list[int]], each: Sequence[float]) -> int:
    """A rank that has room for the expert now, since the least of its others that `free` has not went there. There is
    one: it is full, and `free` is not."""
    moves = [
        (each[other], rank, other)
        for rank, own in enumerate(ranks)
        if expert not in own
        for other in own
        if other not in ranks[free]
    ]
    _, rank, other = min(moves)
    ranks[rank].remove(other)
    ranks[free].append(other)
    return rank


def _in_old_slots(before: Sequence[int], now: Sequence[int]) -> tuple[int, ...]:
    """`now`, with those who were there before in their slots as far as there are so many."""
    slots: list[int | None] = [expert if expert in now else None for expert in before[: len(now)]]
    slots += [None] * (len(now) - len(slots))
    new = [expert for expert in now if expert not in slots]
    return tuple(expert if expert is not None else new.pop(0) for expert in slots)
