"""Granite's mixtures: all experts of a layer lie in `input_linear` (gate, then up) and `output_linear`, by outputs, and
the expert that all tokens pass, or the MLP of a layer without others, lies so below `shared_mlp`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.core.errors import ModelCorrupt
from penstock.hub.families import ExpertNames
from penstock.hub.safetensors_file import TensorInfo
from penstock.hub.stacked_experts import ExpertPlace

_EXPERTS, _SHARED = "block_sparse_moe", "shared_mlp"
_LINEAR = re.compile(
    rf"(?P<layer>model\.layers\.\d+)\.(?P<at>{_EXPERTS}|{_SHARED})\.(?P<which>in|out)put_linear\.weight"
)


def granite_places(infos: Mapping[str, TensorInfo], names: ExpertNames) -> dict[str, ExpertPlace]:
    """Places of experts' parts, by the names that these would have as tensors of their own."""
    found: dict[str, ExpertPlace] = {}
    for tensor, info in infos.items():
        match = _LINEAR.fullmatch(tensor)
        if match is None:
            continue
        is_shared = match["at"] == _SHARED
        if len(info.shape) != (2 if is_shared else 3):
            raise ModelCorrupt(f"tensor '{tensor}' is {list(info.shape)}, which is no linear of Granite's")
        num_outputs = info.shape[-2]
        half = num_outputs // 2
        parts = {names.gate: slice(0, half), names.up: slice(half, num_outputs)}
        if match["which"] == "out":
            parts = {names.down: slice(0, num_outputs)}
        for part, rows in parts.items():
            if is_shared:
                has_experts = any(other.startswith(f"{match['layer']}.{_EXPERTS}.") for other in infos)
                at = f"{names.block}.{names.shared}" if has_experts else names.dense
                found[f"{match['layer']}.{at}.{part}.weight"] = ExpertPlace(tensor, None, rows, "rows")
                continue
            for expert in range(info.shape[0]):
                place = ExpertPlace(tensor, expert, rows, "rows")
                found[f"{match['layer']}.{names.block}.experts.{expert}.{part}.weight"] = place
    return found
