"""Packed weights on a device from named tensors, checked on the way. Knows no architecture and no file format."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.errors import ModelCorrupt
from penstock.core.model_config import ModelConfig
from penstock.hub.checkpoint import Checkpoint, stored_part
from penstock.hub.stored import GroupedTensor, Mxfp4Tensor, NumberFormat, Part, Stored
from penstock.model.expert_layers import ExpertLayers
from penstock.model.ops import Linear, Ops
from penstock.model.quantized import Weight, joined, plain
from penstock.model.quantized.fp8 import Fp8Weight
from penstock.model.quantized.grouped import GroupedWeight
from penstock.model.quantized.int8 import Int8Weight
from penstock.model.quantized.mxfp4 import Mxfp4Weight
from penstock.model.ranks import Ranks, SingleRank, SummedLinear
from penstock.model.shard import Axis, Shard, Split
from penstock.model.stages import Stage

DTYPES: dict[NumberFormat, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}

Read = Callable[[str, torch.device, Part | None], Weight]  # the tensor of this name, or a part, on that device
Move = Callable[[Tensor, torch.device], Tensor]  # a copy on that device
Quantize = Callable[[Weight], Weight]  # a linear's weight, as it is to be kept


class Packed(Protocol):
    """Linear layers that were packed before, by name, or that are made and kept for the next time."""

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear: ...

    def tied(self, name: str, make: Callable[[], tuple[Linear, Linear]]) -> tuple[Linear, Linear]:
        """An embedding and a head of one weight."""


@dataclass(frozen=True)
class Site:
    """A linear layer that was loaded: what it is made of, for whoever adds to it."""

    linear: Linear
    outputs: dict[str, int]  # the joined projections by their full names, side by side, with their sizes
    inputs: int
    order: Tensor | None = None  # of its outputs, where it is not the file's
    parts: dict[str, list[Part]] = field(default_factory=dict)  # of each projection, what this rank has; {}: all

    def shape(self, name: str) -> tuple[int, ...]:
        """[out, in] of a whole projection."""
        return self.parts[name][0].shape if self.parts else (self.outputs[name], self.inputs)


# Projections of a linear, side by side, by name: their sizes. One that holds several has an axis for each.
Outputs = Mapping[str, int | Axis | tuple[Axis, ...]]


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
    is_end_layer: bool = False  # the first or the last one: what is rounded there costs most
    max_context: int | None = None  # tokens that a sequence may come to; None: all that the model can
    ranks: Ranks = field(default_factory=SingleRank)
    stage: Stage = Stage()  # noqa: RUF009 (frozen)
    layer: int = 0  # whose prefix it is; of other prefixes it means nothing
    experts: ExpertLayers | None = None  # where experts of all layers are counted and shared out; None: nobody does
    packed: Packed | None = None  # linear layers as they were packed before; None: nobody keeps them

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def shard(self) -> Shard:
        return self.ranks.shard

    def at(self, path: str) -> Weights:
        return replace(self, prefix=f"{self.prefix}{path}.")

    def tensor(self, path: str, *shape: int) -> Tensor:
        """One tensor of exactly this shape, on the device, in the float type it is stored in."""
        return plain(self._weight(path, *shape))

    def table(self, path: str, vocab_size: int, hidden: int) -> Weight:
        """An embedding or a head, of this rank's tokens: quantized if it is stored so."""
        own, shape = self.shard.vocabulary(vocab_size), (vocab_size, hidden)
        parts = [Part(shape, slice(own.start, own.stop))] if self.shard.size > 1 else []
        return self._weight(path, *shape, parts=parts)

    def vector(self, path: str, size: int) -> Tensor:
        """A norm's weight: used as it is, so it lives on the device in the activations' type."""
        return self.tensor(path, size).to(self.ops.activation_dtype)

    def norm(self, path: str, size: int) -> Tensor:
        """A norm's weight, in a family whose norms may count from one. The addition is not to be rounded away."""
        offset = self.config.norm_offset
        return self.tensor(path, size).float() + offset if offset else self.vector(path, size)

    def linear(
        self,
        outputs: Outputs,
        inputs: int | Axis,
        *,
        split: Split,
        bias: bool = False,
        is_summed: bool = True,
        precise: bool = True,
    ) -> Linear:
        """The projections named in `outputs`, with their output sizes, as one linear that yields them side by side.

        One that is split by rows yields the sum over the ranks, unless the caller takes that sum later.
        """

        def make() -> Linear:
            biases = self.bias(outputs, inputs, split=split) if bias else None
            # Nothing here holds on to the parts while they are packed: with their packed form they would be the peak.
            return self.ops.linear(self.weight(outputs, inputs, split=split), biases, precise=precise)

        linear = make() if self.packed is None else self.packed.linear(self.prefix + "+".join(outputs), make)
        self.note(linear, outputs, inputs, split=split)
        is_sum = split is Split.ROWS and is_summed and self.shard.size > 1
        return SummedLinear(linear, self.ranks) if is_sum else linear

    def note(
        self, linear: Linear, outputs: Outputs, inputs: int | Axis, *, split: Split, order: Tensor | None = None
    ) -> None:
        """A linear that was made of such projections: their names are kept, for adapters."""
        made_of = {f"{self.prefix}{each.path}": each for each in self._projections(outputs, inputs, split)}
        sizes = {name: each.num_outputs for name, each in made_of.items()}
        num_inputs = next(each.num_inputs for each in made_of.values())
        parts = {name: each.parts for name, each in made_of.items() if each.parts}
        self.sites.append(Site(linear, sizes, num_inputs, order, parts))

    def weight(self, outputs: Outputs, inputs: int | Axis, *, split: Split) -> Weight:
        """Weights of such projections, as they are to be kept, to be packed by the caller."""
        return self.quantize(self.stored_weight(outputs, inputs, split=split))

    def stored_weight(self, outputs: Outputs, inputs: int | Axis, *, split: Split) -> Weight:
        """The same, as they are stored."""
        made_of = self._projections(outputs, inputs, split)
        return joined([self._weight(f"{p.path}.weight", *p.shape, parts=p.parts) for p in made_of])

    def sinks(self, path: str, heads: Axis) -> Tensor:
        """Scores of the attention heads that attend on this rank: where ranks share out tokens, those of its group."""
        own = [replace(self.shard, rank=rank).span(heads, f"tensor '{self.prefix}{path}'") for rank in self._group]
        first, last = own[0].start // heads.unit, own[-1].stop // heads.unit
        parts = [Part((heads.num_units,), slice(first, last))] if self.shard.size > 1 else []
        return plain(self._weight(path, heads.num_units, parts=parts)).float()

    @property
    def _group(self) -> range:
        return self.shard.neighbours

    def bias(self, outputs: Outputs, inputs: int | Axis, *, split: Split) -> Tensor | None:
        """The bias of a linear that is split by rows is the first rank's alone: the sum has it once."""
        if split is Split.ROWS and self.shard.rank:
            return None
        found = []
        for each in self._projections(outputs, inputs, split):
            size = each.shape[0]
            found.append(
                plain(self._weight(f"{each.path}.bias", size, parts=[Part((size,), p.rows) for p in each.parts]))
            )
        return torch.cat(found)

    def _projections(self, outputs: Outputs, inputs: int | Axis, split: Split) -> list[_Projection]:
        columns = Axis(inputs) if isinstance(inputs, int) else inputs
        return [self._projection(path, _axes(size), columns, split) for path, size in outputs.items()]

    def _projection(self, path: str, rows: tuple[Axis, ...], columns: Axis, split: Split) -> _Projection:
        shape, name = (sum(axis.size for axis in rows), columns.size), f"tensor '{self.prefix}{path}.weight'"
        parts: list[Part] = []
        if self.shard.size > 1 and split is Split.ROWS:
            own = self.shard.span(columns, name)
            parts = [Part(shape, slice(0, shape[0]), slice(own.start, own.stop))]
        elif self.shard.size > 1 and split is Split.COLUMNS:
            for begin, axis in zip(accumulate((axis.size for axis in rows), initial=0), rows, strict=False):
                own = self.shard.span(axis, name)
                parts.append(Part(shape, slice(begin + own.start, begin + own.stop)))
        return _Projection(path, shape, parts)

    def _weight(self, path: str, *shape: int, parts: Sequence[Part] = ()) -> Weight:
        """All of a tensor, or some parts of it below each other."""
        name = self.prefix + path
        if name not in self.names:
            raise ModelCorrupt(f"{self.checkpoint.path}: tensor '{name}' is missing")
        if parts:
            return joined([self.read(name, self.ops.device, part) for part in parts])
        weight = self.read(name, self.ops.device, None)
        if weight.shape != shape:
            raise ModelCorrupt(f"{self.checkpoint.path}: tensor '{name}' is {list(weight.shape)}, not {list(shape)}")
        return weight


@dataclass(frozen=True)
class _Projection:
    """One of those that a linear joins."""

    path: str
    shape: tuple[int, int]  # of the whole
    parts: list[Part]  # what this rank has of it; []: all

    @property
    def num_outputs(self) -> int:
        return sum(part.rows.stop - part.rows.start for part in self.parts) if self.parts else self.shape[0]

    @property
    def num_inputs(self) -> int:
        first, last = self.parts[0].column_range if self.parts else (0, self.shape[1])
        return last - first


def _axes(size: int | Axis | tuple[Axis, ...]) -> tuple[Axis, ...]:
    if isinstance(size, tuple):
        return size
    return (Axis(size) if isinstance(size, int) else size,)


def _copied(source: Tensor, device: torch.device) -> Tensor:
    return source.to(device, copy=True)


def read_stored(
    checkpoint: Checkpoint, name: str, device: torch.device, part: Part | None = None, *, move: Move = _copied
) -> Weight:
    """One tensor of a checkpoint, moved to the device as it is stored: nothing is widened on the way."""
    stored = checkpoint.stored(name) if part is None else stored_part(checkpoint, name, part)
    return on_device(stored, device, move)


def on_device(stored: Stored, device: torch.device, move: Move = _copied) -> Weight:
    def moved(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        tensor = _as_tensor(array, dtype)
        return tensor if device.type == "cpu" and array.flags.writeable else move(tensor, device)

    if isinstance(stored, GroupedTensor):
        return _grouped(stored, moved)
    if isinstance(stored, Mxfp4Tensor):
        return Mxfp4Weight(moved(stored.values, torch.uint8), moved(stored.scales, torch.uint8))
    values = moved(stored.values, DTYPES[stored.format])
    if stored.format not in ("F8_E4M3", "I8"):
        return values
    assert stored.scales is not None, "a checkpoint scales its 8-bit weights"
    scales = moved(stored.scales, torch.float32)
    return Int8Weight(values, scales) if stored.format == "I8" else Fp8Weight(values, scales, stored.input_scale)


def _grouped(stored: GroupedTensor, moved: Callable[[npt.NDArray[Any], torch.dtype], Tensor]) -> GroupedWeight:
    return GroupedWeight(
        moved(stored.values, torch.uint8),
        stored.bits,
        moved(stored.scales.values, DTYPES[stored.scales.format]),
        None if stored.zeros is None else moved(stored.zeros, torch.uint8),
        None if stored.minimums is None else moved(stored.minimums.values, DTYPES[stored.minimums.format]),
        None if stored.order is None else moved(stored.order, torch.int64),
    )


def _as_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array).view(dtype)
    # Torch cannot mark a tensor read-only, and warns of one over a mapped file. This one is copied from, and is gone.
    alias = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(alias, dtype=dtype).view(array.shape)
