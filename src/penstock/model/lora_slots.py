"""Slots of a device: they hold adapters whose matrices are linears of the operations, by slot and site.

`PlainSlots` is for any operations; those that compute all adapters of a step at once bring their own
(`ops.native_adapters`, `ops.triton.lora.slots`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from penstock.model.batch import Batch, SlotRows
from penstock.model.ops import Linear, Ops, WrappedLinear


@dataclass(frozen=True)
class HostPair:
    """Matrices that an adapter adds to one site, in host memory."""

    a: Tensor  # [ranks, in]: of all the projections that are joined there, below each other
    parts: list[tuple[Tensor, float, int, int]]  # B [out, rank], its scale, its first row of `a`, its first column


@dataclass(frozen=True)
class Part:
    """One of the projections that a site joins."""

    b: Linear  # scaled
    ranks: slice  # of what A makes
    columns: slice  # of the site's output


@dataclass(frozen=True)
class Pair:
    a: Linear
    parts: list[Part]


HostPairs = dict[int, HostPair]  # of one adapter, by site


class Slots(Protocol):
    def prepared(self, pairs: HostPairs) -> Any:
        """Adapter prepared as far as can be before it has a slot. Any one thread may call it, while steps run."""

    def place(self, slot: int, adapter: Any) -> None:
        """Put what was prepared onto the device; what lay in the slot is gone. Call it between steps only."""

    def clear(self, slot: int) -> None: ...

    def begin(self, batch: Batch) -> None:
        """A step begins, with the adapters that the batch names."""

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        """y [tokens, out] += what the adapters of this step make of x [tokens, in]."""


@dataclass(frozen=True)
class AdaptedLinear(WrappedLinear):
    """A linear, and what lies in the slots for it. `base` is as it was loaded."""

    base: Linear
    site: int
    slots: Slots

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x)
        self.slots.add(self.site, x, y)
        return y


class PlainSlots:
    def __init__(self, ops: Ops, num_slots: int) -> None:
        self._ops = ops
        self._slots: list[dict[int, Pair]] = [{} for _ in range(num_slots)]
        self._groups: tuple[SlotRows, ...] = ()

    def prepared(self, pairs: HostPairs) -> HostPairs:
        return pairs

    def place(self, slot: int, adapter: HostPairs) -> None:
        self.clear(slot)
        self._slots[slot] = {site: packed(self._ops, pair) for site, pair in adapter.items()}

    def clear(self, slot: int) -> None:
        self._slots[slot] = {}

    def begin(self, batch: Batch) -> None:
        self._groups = batch.adapters

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        for group in self._groups:
            pair = self._slots[group.slot].get(site)
            if pair is None:
                continue
            is_all = len(group.rows) == len(x)
            hidden = pair.a(x if is_all else x[group.rows])
            for part in pair.parts:
                found, columns = part.b(hidden[:, part.ranks]), y[:, part.columns]
                if is_all:
                    columns += found
                else:
                    columns.index_add_(0, group.rows, found)


def packed(ops: Ops, pair: HostPair) -> Pair:
    parts = [
        Part(
            ops.linear(b.to(ops.device).float() * scale),
            slice(rank, rank + b.shape[1]),
            slice(column, column + b.shape[0]),
        )
        for b, scale, rank, column in pair.parts
    ]
    return Pair(ops.linear(pair.a.to(ops.device).float()), parts)
