"""Weights as they are kept small in memory, one file per format. A linear layer knows its format; nothing else does.

A format is a frozen dataclass of tensors behind `QuantizedWeight`. Operations that multiply it as it is look for its
class; all others take what it stands for (`plain`). `quant` makes weights small, and the hub knows how files pack them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor


class QuantizedWeight(Protocol):
    @property
    def shape(self) -> torch.Size:
        """[out, in] of the weight that it stands for."""

    @property
    def num_bytes(self) -> int: ...

    def dequantized(self) -> Tensor:
        """[out, in] float32"""

    def joined(self, others: Sequence[Self]) -> Self | None:
        """Their outputs behind these; None if the parts differ in more than that."""

    def rows(self, ids: Tensor) -> Self:
        """Some of the outputs: what an embedding looks up."""


Weight = Tensor | QuantizedWeight


def plain(weight: Weight) -> Tensor:
    """Dense form of a weight, for operations that do not know its format."""
    return weight if isinstance(weight, Tensor) else weight.dequantized()


def joined(parts: Sequence[Weight]) -> Weight:
    """One weight with the outputs of all: in their format if all have the same, else in plain floats."""
    first, *others = parts
    if not others:
        return first
    if not isinstance(first, Tensor) and all(type(part) is type(first) for part in others):
        together = first.joined(others)  # type: ignore[arg-type]
        if together is not None:
            return together
    return torch.cat([plain(part) for part in parts])


def num_bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Below each other; None if there are none."""
    present = [tensor for tensor in tensors if tensor is not None]
    assert len(present) in (0, len(tensors)), "either all parts have it or none"
    return torch.cat(present) if present else None
