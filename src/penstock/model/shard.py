"""Which part of a model a rank has: how a linear is split, and where the rank's share begins. It knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.core.errors import ModelUnsupported


class Split(Enum):
    """How a linear is divided among ranks. Columns and rows are those of x @ W, as the papers on it count them."""

    NONE = "none"  # every rank has all of it
    COLUMNS = "columns"  # each has some of the outputs
    ROWS = "rows"  # each has some of the inputs: what it makes is its part of a sum over the ranks


@dataclass(frozen=True)
class Axis:
    """The outputs or the inputs of a linear, in units that are never cut: heads, or single numbers."""

    size: int
    unit: int = 1
    repeats: bool = False  # with fewer units than ranks, several ranks have the same one: heads of keys and values

    @property
    def num_units(self) -> int:
        return self.size // self.unit


@dataclass(frozen=True)
class Shard:
    rank: int = 0
    size: int = 1

    def span(self, axis: Axis, what: str) -> range:
        """The rank's share of an axis; `what` names it where it cannot be shared out evenly."""
        units = axis.num_units
        if units % self.size == 0:
            count = units // self.size
            first = self.rank * count
        elif axis.repeats and self.size % units == 0:
            count, first = 1, self.rank // (self.size // units)
        else:
            works = [size for size in range(1, self.size) if units % size == 0]
            raise ModelUnsupported(
                f"{what} cannot be split over {self.size} ranks: it has {units} units of {axis.unit}. "
                f"Fewer ranks that work: {', '.join(map(str, works))}"
            )
        return range(first * axis.unit, (first + count) * axis.unit)

    def num_units(self, axis: Axis, what: str) -> int:
        return len(self.span(axis, what)) // axis.unit

    def vocabulary(self, size: int) -> range:
        """The rank's tokens: as many for each, but for what the last ranks are short of."""
        each = -(-size // self.size)
        return range(min(self.rank * each, size), min((self.rank + 1) * each, size))
