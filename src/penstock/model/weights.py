"""From named tensors to packed weights on a device, checked on the way. Knows no architecture and no file format."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.errors import ModelCorrupt
from penstock.core.model_config import ModelConfig
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.stored import GroupedTensor, NumberFormat, Stored
from penstock.model.ops import Linear, Ops
from penstock.model.quantized import Weight, joined, plain
from penstock.model.quantized.fp8 import Fp8Weight
from penstock.model.quantized.grouped import GroupedWeight
from penstock.model.quantized.int8 import Int8Weight

DTYPES: dict[NumberFormat, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}

Read = Callable[[str, torch.device], Weight]  # the tensor of this name, on that device
Quantize = Callable[[Weight], Weight]  # a linear's weight, as it is to be kept


@dataclass(frozen=True)
class Site:
    """A linear layer that was loaded: what it is made of, for whoever adds to it."""

    linear: Linear
    outputs: dict[str, int]  # the joined projections by their full names, side by side, with their sizes
    inputs: int
    order: Tensor | None = None  # of its outputs, where it is not the file's


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint below one prefix, and the operations they are packed for."""

    checkpoint: Checkpoint
    read: Read
    ops: Ops
    names: frozenset[str]
    quantize: Quantize = lambda weight: weight
    prefix: str = ""
    sites: list[Site] = field(default_factory=list)  # of all prefixes together, as they are loaded
    max_context: int | None = None  # tokens that a sequence may come to; None: all that the model can

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def at(self, path: str) -> Weights:
        return replace(self, prefix=f"{self.prefix}{path}.")

    def tensor(self, path: str, *shape: int) -> Tensor:
        """One tensor of exactly this shape, on the device, in the float type it is stored in."""
        return plain(self._weight(path, *shape))

    def table(self, path: str, *shape: int) -> Weight:
        """An embedding or a head: quantized if it is stored so."""
        return self._weight(path, *shape)

    def vector(self, path: str, size: int) -> Tensor:
        """A norm's weight: used as it is, so it lives on the device in the activations' type."""
        return self.tensor(path, size).to(self.ops.activation_dtype)

    def norm(self, path: str, size: int) -> Tensor:
        """The same, of a family whose norms may count from one. What is added then is not to be rounded away."""
        offset = self.config.norm_offset
        return self.tensor(path, size).float() + offset if offset else self.vector(path, size)

    def linear(self, outputs: dict[str, int], inputs: int, *, bias: bool = False) -> Linear:
        """The projections named in `outputs`, with their output sizes, as one linear that yields them side by side."""
        biases = [self.tensor(f"{path}.bias", size) for path, size in outputs.items()] if bias else None
        # Nothing here holds on to the parts while they are packed: with their packed form they would be the peak.
        linear = self.ops.linear(self.weight(outputs, inputs), torch.cat(biases) if biases else None)
        self.note(linear, outputs, inputs)
        return linear

    def note(self, linear: Linear, outputs: dict[str, int], inputs: int, order: Tensor | None = None) -> None:
        """A linear that was made of such projections: their names are kept, for adapters."""
        names = {f"{self.prefix}{path}": size for path, size in outputs.items()}
        self.sites.append(Site(linear, names, inputs, order))

    def weight(self, outputs: dict[str, int], inputs: int) -> Weight:
        """Such projections' weights, as they are to be kept, to be packed by the caller."""
        parts = [self._weight(f"{path}.weight", size, inputs) for path, size in outputs.items()]
        return self.quantize(joined(parts))

    def _weight(self, path: str, *shape: int) -> Weight:
        name = self.prefix + path
        if name not in self.names:
            raise ModelCorrupt(f"{self.checkpoint.path}: tensor '{name}' is missing")
        weight = self.read(name, self.ops.device)
        if weight.shape != shape:
            raise ModelCorrupt(f"{self.checkpoint.path}: tensor '{name}' is {list(weight.shape)}, not {list(shape)}")
        return weight


def read_stored(checkpoint: Checkpoint, name: str, device: torch.device) -> Weight:
    """One tensor of a checkpoint, moved to the device as it is stored: nothing is widened on the way."""
    return on_device(checkpoint.stored(name), device)


def on_device(stored: Stored, device: torch.device) -> Weight:
    if isinstance(stored, GroupedTensor):
        return _grouped(stored, device)
    values = _moved(stored.values, DTYPES[stored.format], device)
    if stored.format not in ("F8_E4M3", "I8"):
        return values
    assert stored.scales is not None, "a checkpoint scales its 8-bit weights"
    scales = _moved(stored.scales, torch.float32, device)
    return Int8Weight(values, scales) if stored.format == "I8" else Fp8Weight(values, scales, stored.input_scale)


def _grouped(stored: GroupedTensor, device: torch.device) -> GroupedWeight:
    return GroupedWeight(
        _moved(stored.values, torch.uint8, device),
        stored.bits,
        _moved(stored.scales.values, DTYPES[stored.scales.format], device),
        None if stored.zeros is None else _moved(stored.zeros, torch.uint8, device),
        None if stored.minimums is None else _moved(stored.minimums.values, DTYPES[stored.minimums.format], device),
        None if stored.order is None else _moved(stored.order, torch.int64, device),
    )


def _moved(array: npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array).view(dtype).to(device)
    # Torch cannot mark a tensor read-only, and warns of one over a mapped file. This one is copied from, and is gone.
    alias = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(alias, dtype=dtype).view(array.shape).to(device, copy=True)
