"""Shard of a model that a rank has: how a linear is split, and where the rank's share begins. It knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from penstock.core.errors import ModelUnsupported
from penstock.model.sequence import TokenSplit


class Split(Enum):
    """Split of a linear among ranks. Columns and rows are those of x @ W, as the papers on it count them."""

    NONE = "none"  # every rank has all of it
    COLUMNS = "columns"  # each has some of the outputs
    ROWS = "rows"  # each has some of the inputs: what it makes is its part of a sum over the ranks


@dataclass(frozen=True)
class Axis:
    """The outputs or the inputs of a linear, in units that are never cut: heads, or single numbers."""

    size: int
    unit: int = 1
    repeats: bool = False  # with fewer units than ranks, several ranks have the same one: heads of keys and values
    group: int | None = None  # units that may be shared out unevenly, if so many stay together: heads of one key
    are_heads: bool = False  # of attention: ranks that share out tokens have the same keys, and of queries even shares

    @property
    def num_units(self) -> int:
        return self.size // self.unit


@dataclass(frozen=True)
class Shard:
    """One of `size` ranks; `sp` neighbours of them share out the tokens of every sequence."""

    rank: int = 0
    size: int = 1
    sp: int = 1

    @property
    def tokens(self) -> TokenSplit:
        return TokenSplit(self.rank % self.sp, self.sp)

    @property
    def neighbours(self) -> range:
        """The ranks of its group, by which tokens are shared out, itself included."""
        first = self.rank // self.sp * self.sp
        return range(first, first + self.sp)

    def span(self, axis: Axis, what: str) -> range:
        """The rank's share of an axis; `what` names it where it cannot be shared out evenly."""
        if self.sp > 1 and axis.are_heads:
            whole = replace(axis, group=None, are_heads=False)
            shard = Shard(self.rank // self.sp, self.size // self.sp) if axis.repeats else self
            return shard.span(whole, what)
        units, together = axis.num_units, axis.group or 1
        num_groups = units // together
        if axis.group is not None and num_groups > self.size:
            first, last = (self._first_of(num_groups, rank) * together for rank in (self.rank, self.rank + 1))
            count = last - first
        elif units % self.size == 0:
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

    def _first_of(self, count: int, rank: int) -> int:
        """Start of a rank's share of so many. The last ranks have one more: the first has a scheduler to run."""
        each, more = divmod(count, self.size)
        return rank * each + max(0, rank - (self.size - more))

    def num_units(self, axis: Axis, what: str) -> int:
        return len(self.span(axis, what)) // axis.unit

    def vocabulary(self, size: int) -> range:
        """The rank's tokens: as many for each, but for what the last ranks are short of."""
        each = -(-size // self.size)
        return range(min(self.rank * each, size), min((self.rank + 1) * each, size))
