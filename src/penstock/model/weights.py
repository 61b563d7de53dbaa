"""From named tensors to packed weights on a device, checked on the way. Knows no architecture and no file format."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.errors import ModelCorrupt
from penstock.core.model_config import ModelConfig
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.stored import NumberFormat
from penstock.model.ops import Fp8Weight, Linear, Ops, plain

DTYPES: dict[NumberFormat, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}

Read = Callable[[str, torch.device], Tensor | Fp8Weight]  # the tensor of this name, on that device


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint below one prefix, and the operations they are packed for."""

    checkpoint: Checkpoint
    read: Read
    ops: Ops
    names: frozenset[str]
    prefix: str = ""

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def at(self, path: str) -> Weights:
        return replace(self, prefix=f"{self.prefix}{path}.")

    def tensor(self, path: str, *shape: int) -> Tensor:
        """One tensor of exactly this shape, on the device, in the float type it is stored in."""
        return plain(self._weight(path, *shape))

    def vector(self, path: str, size: int) -> Tensor:
        """A norm's weight: used as it is, so it lives on the device in the activations' type."""
        return self.tensor(path, size).to(self.ops.activation_dtype)

    def linear(self, outputs: dict[str, int], inputs: int, *, bias: bool = False) -> Linear:
        """The projections named in `outputs`, with their output sizes, as one linear that yields them side by side."""
        biases = [self.tensor(f"{path}.bias", size) for path, size in outputs.items()] if bias else None
        # Nothing here holds on to the parts while they are packed: with their packed form they would be the peak.
        weight = _joined([self._weight(f"{path}.weight", size, inputs) for path, size in outputs.items()])
        return self.ops.linear(weight, torch.cat(biases) if biases else None)

    def _weight(self, path: str, *shape: int) -> Tensor | Fp8Weight:
        name = self.prefix + path
        if name not in self.names:
            raise ModelCorrupt(f"{self.checkpoint.path}: tensor '{name}' is missing")
        weight = self.read(name, self.ops.device)
        found = weight.values.shape if isinstance(weight, Fp8Weight) else weight.shape
        if found != shape:
            raise ModelCorrupt(f"{self.checkpoint.path}: tensor '{name}' is {list(found)}, not {list(shape)}")
        return weight


def read_stored(checkpoint: Checkpoint, name: str, device: torch.device) -> Tensor | Fp8Weight:
    """One tensor of a checkpoint, moved to the device as it is stored: nothing is widened on the way."""
    stored = checkpoint.stored(name)
    values = _moved(stored.values, DTYPES[stored.format], device)
    if stored.format != "F8_E4M3":
        return values
    assert stored.scales is not None, "a checkpoint scales its FP8 weights"
    return Fp8Weight(values, _moved(stored.scales, torch.float32, device), stored.input_scale)


def _moved(array: npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array).view(dtype).to(device)
    # Torch cannot mark a tensor read-only, and warns of one over a mapped file. This one is copied from, and is gone.
    alias = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(alias, dtype=dtype).view(array.shape).to(device, copy=True)


def _joined(parts: list[Tensor | Fp8Weight]) -> Tensor | Fp8Weight:
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, Fp8Weight)]
    if len(quantized) < len(parts):
        return torch.cat([plain(part) for part in parts])
    # The parts read the same activations, and those are quantized once: with the largest of the scales that the parts
    # were calibrated to, nothing is clipped that was not before. One part without a scale makes all dynamic.
    input_scales = [part.input_scale for part in quantized if part.input_scale is not None]
    return Fp8Weight(
        torch.cat([part.values for part in quantized]),
        torch.cat([part.scales for part in quantized]),
        max(input_scales) if len(input_scales) == len(quantized) else None,
    )
