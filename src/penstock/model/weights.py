"""From a checkpoint's named arrays to packed weights on a device, checked on the way. Knows no architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.core.errors import ModelCorrupt
from penstock.core.model_config import ModelConfig
from penstock.hub.checkpoint import Checkpoint
from penstock.model.ops import Linear, Ops


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint below one prefix, and the operations they are packed for."""

    checkpoint: Checkpoint
    ops: Ops
    names: frozenset[str]
    prefix: str = ""

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def at(self, path: str) -> Weights:
        return replace(self, prefix=f"{self.prefix}{path}.")

    def tensor(self, path: str, *shape: int) -> Tensor:
        """One float32 tensor on the CPU, of exactly this shape."""
        name = self.prefix + path
        if name not in self.names:
            raise ModelCorrupt(f"{self.checkpoint.path}: tensor '{name}' is missing")
        array = self.checkpoint.tensor(name)
        if array.shape != shape:
            raise ModelCorrupt(f"{self.checkpoint.path}: tensor '{name}' is {list(array.shape)}, not {list(shape)}")
        # Torch cannot mark a tensor read-only; a view of a mapped file must not become writable through it.
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def vector(self, path: str, size: int) -> Tensor:
        """A norm's weight: used as it is, so it lives on the device in the activations' type."""
        return self.tensor(path, size).to(self.ops.device, self.ops.activation_dtype)

    def linear(self, outputs: dict[str, int], inputs: int, *, bias: bool = False) -> Linear:
        """The projections named in `outputs`, with their output sizes, as one linear that yields them side by side."""
        weights = [self.tensor(f"{path}.weight", size, inputs) for path, size in outputs.items()]
        biases = [self.tensor(f"{path}.bias", size) for path, size in outputs.items()] if bias else None
        return self.ops.linear(_joined(weights), _joined(biases) if biases else None)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
