"""Collectives between the ranks of one model, and the linears that need them: sums of parts, columns side by side.

The ways by which ranks reach each other are elsewhere: `ops/shared_memory.py` on a CPU, `runner/ranks` between devices.
A model on one rank has none of these objects in it: its linears are those that the operations made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from penstock.model.ops import Linear, WrappedLinear
from penstock.model.shard import Shard


class Ranks(Protocol):
    """The ranks of one model, as one of them sees them. All make the same calls in the same order."""

    @property
    def shard(self) -> Shard: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what all ranks bring: all-reduce. Every rank gets the same bits."""

    def gather(self, x: Tensor, among: int | None = None) -> Tensor:
        """[rows, columns] of all ranks side by side, in the order of ranks: all-gather. `among`: of this rank's group
        of so many neighbours only; all ranks call it all the same."""

    def exchange(self, x: Tensor) -> Tensor:
        """All-to-all among the neighbours that share out tokens (`shard.sp`): x [sp, rows, columns] has a part for each
        of them; returned is what each of them has for this one, bit by bit."""

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's, on all of them. The others bring a tensor of its shape and type, whatever is in it."""


class SingleRank:
    """A rank that has the whole model."""

    shard = Shard()

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, among: int | None = None) -> Tensor:
        return x

    def exchange(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class LoneRank:
    """A rank without the others: its shapes are right, and its numbers mean nothing. Kernels are compiled with it."""

    shard: Shard

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, among: int | None = None) -> Tensor:
        return x.repeat(1, among or self.shard.size)

    def exchange(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class SummedLinear(WrappedLinear):
    """A linear that is split by rows: each rank's part, then the sum."""

    linear: Linear
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self.ranks.sum(self.linear(x))


@dataclass(frozen=True)
class SplitEmbedding(WrappedLinear):
    """A lookup in a table whose rows are split: one rank finds a token, the others bring zeros."""

    lookup: Linear
    first: int
    count: int
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        ids = x - self.first
        is_elsewhere = (ids < 0) | (ids >= self.count)
        found = self.lookup(ids.masked_fill(is_elsewhere, 0))
        return self.ranks.sum(found.masked_fill(is_elsewhere[:, None], 0.0))


@dataclass(frozen=True)
class GatheredHead(WrappedLinear):
    """Logits of a vocabulary that is split, each rank's beside the others'."""

    head: Linear
    each: int  # tokens of a rank; the last may have fewer
    vocab_size: int
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        if missing := self.each - logits.shape[1]:
            logits = F.pad(logits, (0, missing))
        return self.ranks.gather(logits)[:, : self.vocab_size].contiguous()


def split_embedding(lookup: Linear, vocab_size: int, ranks: Ranks) -> Linear:
    """The embedding of all tokens, of a lookup of this rank's."""
    if ranks.shard.size == 1:
        return lookup
    own = ranks.shard.vocabulary(vocab_size)
    return SplitEmbedding(lookup, own.start, len(own), ranks)


def gathered_head(head: Linear, vocab_size: int, ranks: Ranks) -> Linear:
    """The head of all tokens, of one of this rank's."""
    size = ranks.shard.size
    return head if size == 1 else GatheredHead(head, -(-vocab_size // size), vocab_size, ranks)
