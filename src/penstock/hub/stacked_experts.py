"""Experts of a layer that lie in one tensor (gpt-oss, Llama 4, Qwen3.5), by the names that they would have as tensors
of their own.

A tensor is [experts, in, out] or [experts, out, in] in floats, and in MXFP4 [experts, out, groups of inputs, bytes]
(`mxfp4`), and gate and up are outputs of one: they take turns there, or lie behind each other (`ExpertNames.stacked`).
Knows names and places, not what is done with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from penstock.core.errors import ModelCorrupt
from penstock.hub.families import ExpertNames
from penstock.hub.mxfp4 import BLOCKS, scales_of
from penstock.hub.quantization import Tensors
from penstock.hub.safetensors_file import TensorInfo
from penstock.hub.stored import Mxfp4Tensor, Part, Stored

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_STACKED = re.compile(rf"(?P<at>.*\.experts)\.(?P<which>{_GATE_UP}|{_DOWN})(?P<kind>_bias|{BLOCKS})?")
# Layouts of an expert: floats as [in, out] or as [out, in], a bias, or blocks.
_Kind = Literal["columns", "rows", "bias", "mxfp4"]
_KINDS: dict[str | None, _Kind] = {None: "columns", "_bias": "bias", BLOCKS: "mxfp4"}
_DIMENSIONS: dict[_Kind, int] = {"columns": 3, "rows": 3, "bias": 2, "mxfp4": 4}


@dataclass(frozen=True)
class ExpertPlace:
    """Place of one expert's weight or bias in the file."""

    tensor: str  # of the file
    expert: int | None  # None: the tensor has no other
    rows: slice  # its outputs, of all that the tensor has of the expert
    kind: _Kind

    def stored(self, tensors: Tensors, part: Part | None, name: str) -> Stored:
        """All of it, or a part of it. `tensors`: of the file."""
        if self.kind == "mxfp4":
            return self._in_mxfp4(tensors, part, name)
        whole = tensors.floats(self.tensor)
        values = whole.values if self.expert is None else whole.values[self.expert]
        own = (values.T if self.kind == "columns" else values)[self.rows]
        found = replace(whole, values=own)
        if part is not None:
            found = found.part(part, name)
        return replace(found, values=np.ascontiguousarray(found.values))

    def _in_mxfp4(self, tensors: Tensors, part: Part | None, name: str) -> Mxfp4Tensor:
        blocks = tensors.integers(self.tensor)[self.expert, self.rows]  # [outputs, groups, bytes]
        scales = tensors.integers(scales_of(self.tensor))[self.expert, self.rows]
        found = Mxfp4Tensor(blocks.reshape(len(blocks), -1), scales)
        if part is not None:
            found = found.part(part, name)
        return Mxfp4Tensor(np.ascontiguousarray(found.values), np.ascontiguousarray(found.scales))


def expert_places(infos: Mapping[str, TensorInfo], names: ExpertNames) -> dict[str, ExpertPlace]:
    """Every weight and bias that lies in a stacked tensor."""
    found: dict[str, ExpertPlace] = {}
    for tensor, info in infos.items():
        match = _STACKED.fullmatch(tensor)
        if match is None:
            continue
        kind = _KINDS[match["kind"]]
        if kind == "columns" and names.stacked == "rows":
            kind = "rows"
        if len(info.shape) != _DIMENSIONS[kind]:
            raise ModelCorrupt(f"tensor '{tensor}' is {list(info.shape)}, which are no experts in one tensor")
        suffix = "bias" if kind == "bias" else "weight"
        num_outputs = info.shape[1] if kind in ("rows", "mxfp4") else info.shape[-1]
        for part, rows in _parts(match["which"], num_outputs, names):
            for expert in range(info.shape[0]):
                place = ExpertPlace(tensor, expert, rows, kind)
                found[f"{match['at']}.{expert}.{part}.{suffix}"] = place
    return found


def _parts(which: str, num_outputs: int, names: ExpertNames) -> Iterable[tuple[str, slice]]:
    if which == _DOWN:
        return [(names.down, slice(0, num_outputs))]
    if names.stacked == "interleaved":
        return [(names.gate, slice(0, num_outputs, 2)), (names.up, slice(1, num_outputs, 2))]
    half = num_outputs // 2
    return [(names.gate, slice(0, half)), (names.up, slice(half, num_outputs))]
