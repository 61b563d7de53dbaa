"""The numbers that a group of weights may become: equal steps from a zero point, as many as the bits can count.

The best steps depend on what an error costs; the caller that fits a grid says it. Knows no method and no layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.quantized.grouped import Bits, GroupedWeight, packed

# Shares of a group's largest number at which it may be cut off: finer steps for all others.
SHARES = tuple(1.0 - 0.05 * i for i in range(11))

Cost = Callable[[Tensor], Tensor]  # of errors [out, groups, in group], for each group: [out, groups]


@dataclass(frozen=True)
class Steps:
    """(value - zero) * scale"""

    scales: Tensor  # [out, groups] float32 that float16 holds exactly
    zeros: Tensor  # [out, groups] float32

    def rounded(self, weights: Tensor, bits: Bits) -> Tensor:
        """[out, groups, in group] -> integers, in float32"""
        return (weights / self.scales[..., None]).round_().add_(self.zeros[..., None]).clamp_(0, (1 << bits) - 1)

    def meant(self, integers: Tensor) -> Tensor:
        return (integers - self.zeros[..., None]) * self.scales[..., None]


@dataclass(frozen=True)
class Grid:
    bits: Bits
    symmetric: bool  # the zero point is the middle

    def widest(self, groups: Tensor, share: float = 1.0) -> Steps:
        """Steps over [out, groups, in group] that reach every number; or this share of the way."""
        low, high = groups.amin(dim=-1) * share, groups.amax(dim=-1) * share
        return self._signed(low, high) if self.symmetric else self._shifted(low, high)

    def best(self, groups: Tensor, cost: Cost) -> Steps:
        """Steps of the share whose errors cost least, of several; each group has its own."""
        best = self.widest(groups)
        least = cost(self.error(groups, best))
        for share in SHARES[1:]:
            steps = self.widest(groups, share)
            found = cost(self.error(groups, steps))
            is_better = found < least
            least = torch.where(is_better, found, least)
            scales = torch.where(is_better, steps.scales, best.scales)
            best = Steps(scales, torch.where(is_better, steps.zeros, best.zeros))
        return best

    def error(self, groups: Tensor, steps: Steps) -> Tensor:
        return steps.meant(steps.rounded(groups, self.bits)) - groups

    def nearest(self, weight: Tensor, steps: Steps) -> GroupedWeight:
        """A [out, in] weight, each number by itself."""
        integers = steps.rounded(weight.view(weight.shape[0], steps.scales.shape[1], -1), self.bits)
        return self.kept(integers.flatten(1), steps)

    def kept(self, integers: Tensor, steps: Steps, order: Tensor | None = None) -> GroupedWeight:
        values = integers.to(torch.uint8)
        return GroupedWeight(
            packed(values) if self.bits == 4 else values,
            self.bits,
            steps.scales.to(torch.float16),
            None if self.symmetric else steps.zeros.to(torch.uint8),
            order=order,
        )

    def _signed(self, low: Tensor, high: Tensor) -> Steps:
        """The end that reaches further is for the number that is largest; the other end has one step less."""
        middle = 1 << (self.bits - 1)
        largest = torch.where(-low > high, low, high)
        return Steps(_representable(-largest / middle), torch.full_like(low, middle))

    def _shifted(self, low: Tensor, high: Tensor) -> Steps:
        """The zero point is a value, so that zero stays zero; and never the lowest, which GPTQ's files cannot say."""
        most = (1 << self.bits) - 1
        high = high.clamp(min=0.0)
        low = torch.minimum(low, -high / (most - 1))
        scales = _representable((high - low) / most)
        return Steps(scales, (-low / scales).round().clamp(1, most))


def _representable(scales: Tensor) -> Tensor:
    """Scales rounded to float16, and not zero."""
    narrow = scales.to(torch.float16)
    return torch.where(narrow == 0, torch.finfo(torch.float16).tiny, narrow).float()
