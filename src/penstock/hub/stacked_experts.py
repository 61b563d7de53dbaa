"""Experts of a layer that lie in one tensor (gpt-oss, Llama 4, Qwen3.5), by the names that they would have as tensors
of their own.

In floats a tensor is [experts, in, out] or [experts, out, in], and gate and up are outputs of one: they take turns
there, or lie behind each other (`ExpertNames.stacked`). Knows names and places, not what is done with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.errors import ModelCorrupt
from penstock.hub.families import ExpertNames
from penstock.hub.safetensors_file import TensorInfo
from penstock.hub.stored import Part, Stored, StoredTensor

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_STACKED = re.compile(rf"(?P<at>.*\.experts)\.(?P<which>{_GATE_UP}|{_DOWN})(?P<kind>_bias)?")


@dataclass(frozen=True)
class ExpertPlace:
    """Where a weight or a bias of one expert lies."""

    tensor: str  # of the file
    expert: int | None  # None: the tensor has no other
    rows: slice  # its outputs, of all that the tensor has of the expert
    is_bias: bool = False
    by_outputs: bool = False  # the tensor is [experts, out, in]

    def stored(self, whole: StoredTensor, part: Part | None, name: str) -> Stored:
        """`whole`: the tensor that it lies in."""
        values = whole.values if self.expert is None else whole.values[self.expert]
        own = (values if self.is_bias or self.by_outputs else values.T)[self.rows]
        found = replace(whole, values=own)
        if part is not None:
            found = found.part(part, name)
        return replace(found, values=np.ascontiguousarray(found.values))


def expert_places(infos: Mapping[str, TensorInfo], names: ExpertNames) -> dict[str, ExpertPlace]:
    """Every weight and bias that lies in a stacked tensor."""
    found: dict[str, ExpertPlace] = {}
    for tensor, info in infos.items():
        match = _STACKED.fullmatch(tensor)
        if match is None:
            continue
        is_bias = match["kind"] is not None
        if len(info.shape) != (2 if is_bias else 3):
            raise ModelCorrupt(f"tensor '{tensor}' is {list(info.shape)}, which are no experts in one tensor")
        suffix = "bias" if is_bias else "weight"
        by_outputs = names.stacked == "rows"
        num_outputs = info.shape[1] if by_outputs else info.shape[-1]
        for part, rows in _parts(match["which"], num_outputs, names):
            for expert in range(info.shape[0]):
                place = ExpertPlace(tensor, expert, rows, is_bias, by_outputs)
                found[f"{match['at']}.{expert}.{part}.{suffix}"] = place
    return found


def _parts(which: str, num_outputs: int, names: ExpertNames) -> Iterable[tuple[str, slice]]:
    if which == _DOWN:
        return [(names.down, slice(0, num_outputs))]
    if names.stacked == "interleaved":
        return [(names.gate, slice(0, num_outputs, 2)), (names.up, slice(1, num_outputs, 2))]
    half = num_outputs // 2
    return [(names.gate, slice(0, half)), (names.up, slice(half, num_outputs))]
