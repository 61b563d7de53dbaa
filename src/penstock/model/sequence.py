"""Sequence (context) parallelism: which tokens of a sequence a rank keeps, and attention over what several ranks keep.

Ranks of a group have the same heads of keys and values, and blocks of tokens go to them in turn. Each attends with the
queries of all of them to the tokens that it keeps; what they find is exchanged, and merged by log-sum-exp. It knows no
kernel: operations bring their own attention over a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from penstock.model.ops import AttentionSpec
    from penstock.model.ranks import Ranks

# Attention of a whole group's queries over this rank's keys and values: outputs [tokens, heads * dim] and the
# log-sum-exp of scores [tokens, heads] in float32; -inf where a query sees no token of this rank.
PartialAttention = Callable[[Tensor, "AttentionSpec"], tuple[Tensor, Tensor]]

Merge = Callable[[Tensor, int], Tensor]  # see `merged`


@dataclass(frozen=True)
class TokenSplit:
    """Tokens that a rank keeps: of every `size` blocks of a sequence the one at `place`."""

    place: int = 0
    size: int = 1

    def kept(self, count: Tensor, block_size: int) -> Tensor:
        """Tokens that are kept of a sequence's first `count`. If the next one is kept too, this is its place."""
        round_size = block_size * self.size
        newest = count % round_size - self.place * block_size
        return count // round_size * block_size + newest.clamp(0, block_size)

    def keeps(self, positions: Tensor, block_size: int) -> Tensor:
        return positions // block_size % self.size == self.place


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that keep a sequence's tokens together, as one of them sees them."""

    ranks: Ranks

    @property
    def size(self) -> int:
        return self.ranks.shard.sp

    def attention(
        self, qkv: Tensor, spec: AttentionSpec, attend: PartialAttention, merge: Merge | None = None
    ) -> Tensor:
        """Attention of this rank's heads over all tokens: [tokens, heads * dim]. All ranks call it at once. `merge`: a
        kernel instead of `merged`."""
        own = spec.num_heads * spec.head_dim
        queries = self.ranks.gather(qkv[:, :own], self.size)
        of_group = replace(spec, num_heads=spec.num_heads * self.size)
        parts = packed(*attend(torch.cat((queries, qkv[:, own:]), dim=1), of_group), self.size)
        return (merge or merged)(self.ranks.exchange(parts), spec.num_heads)


def packed(out: Tensor, lse: Tensor, size: int) -> Tensor:
    """Results of a rank for the heads of each of `size` ranks, [size, tokens, width]: outputs, then log-sum-exps."""
    outs, sums = (each.reshape(len(out), size, -1) for each in (out, lse.view(out.dtype)))
    return torch.cat((outs, sums), dim=2).transpose(0, 1)


def merged(parts: Tensor, num_heads: int) -> Tensor:
    """Softmax over all tokens, of what each rank found over its own, [ranks, tokens, width]: in the order of ranks."""
    sum_width = num_heads * torch.float32.itemsize // parts.itemsize
    lse = parts[:, :, -sum_width:].contiguous().view(torch.float32)  # [ranks, tokens, heads]
    outs = parts[:, :, :-sum_width].reshape(*lse.shape, -1).float()
    highest = lse.amax(dim=0).clamp(min=torch.finfo(torch.float32).min)  # finite: padding sees nothing anywhere
    weights = torch.exp(lse - highest)
    found, total = outs[0] * weights[0][:, :, None], weights[0].clone()
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        found += out * weight[:, :, None]
        total += weight
    return (found / total.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]).flatten(1).to(parts.dtype)
