"""RMSNorm of queries, and of keys, over all heads together, as OLMo has it: a rank with some of the heads asks the
others how large theirs are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.model.layers import kv_heads, query_heads
from penstock.model.ops import Norm, Ops, Stream
from penstock.model.ranks import Ranks
from penstock.model.rope import paired_rows
from penstock.model.shard import Axis, Shard
from penstock.model.weights import Weights


@dataclass(frozen=True, slots=True)
class WholeNorm:
    """`weight` is this rank's part, of an axis of `size`."""

    ops: Ops
    norm: Norm
    size: int
    copies: int = 1  # ranks that have the same heads
    ranks: Ranks | None = None  # None: this one has all

    @classmethod
    def load(cls, weights: Weights, path: str, axis: Axis) -> WholeNorm:
        shard, name = weights.shard, f"tensor '{weights.prefix}{path}.weight'"
        own = shard.span(axis, name)
        weight = weights.norm(f"{path}.weight", axis.size)[own.start : own.stop]
        config = weights.config
        if config.rotary_dim is not None:  # dimensions lie as `model.ordered` puts them
            order = paired_rows(config.head_dim, config.rotary_dim).to(weight.device)
            weight = weight.view(-1, config.head_dim)[:, order].flatten()
        return cls(
            weights.ops,
            Norm(weight.contiguous(), config.norm_eps),
            axis.size,
            copies=_copies(shard, axis, name),
            ranks=weights.ranks if shard.size > 1 else None,
        )

    @property
    def num_own(self) -> int:
        return self.norm.weight.shape[0]

    def __call__(self, x: Tensor, squares: Tensor | None) -> Tensor:
        """`squares` [tokens, 1] float32: of all ranks' numbers, summed; None: there is one rank."""
        if squares is None:
            return self.ops.normed(Stream(x.contiguous()), self.norm)
        scaled = x.float() * torch.rsqrt(squares / self.size + self.norm.eps)
        return (self.norm.weight * scaled.to(self.norm.weight.dtype)).to(x.dtype)

    def squares(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over all."""
        return x.float().square().sum(dim=1, keepdim=True) / self.copies


@dataclass(frozen=True, slots=True)
class HeadNorms:
    queries: WholeNorm
    keys: WholeNorm

    @classmethod
    def load(cls, weights: Weights) -> HeadNorms:
        """`weights`: of the attention."""
        config = weights.config
        return cls(
            WholeNorm.load(weights, "q_norm", query_heads(config)), WholeNorm.load(weights, "k_norm", kv_heads(config))
        )

    def __call__(self, qkv: Tensor) -> Tensor:
        """Queries and keys normed, values as they are."""
        queries, keys = self.queries, self.keys
        q, k, v = qkv.split_with_sizes(
            [queries.num_own, keys.num_own, qkv.shape[1] - queries.num_own - keys.num_own], dim=1
        )
        if queries.ranks is None:
            return torch.cat((queries(q, None), keys(k, None), v), dim=1)
        squares = queries.ranks.sum(torch.cat((queries.squares(q), keys.squares(k)), dim=1))
        return torch.cat((queries(q, squares[:, :1]), keys(k, squares[:, 1:]), v), dim=1)


def _copies(shard: Shard, axis: Axis, name: str) -> int:
    """Heads that several ranks have are summed as often: all of them are, or none."""
    return sum(len(replace(shard, rank=rank).span(axis, name)) for rank in range(shard.size)) // axis.size
