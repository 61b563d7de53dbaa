"""Quantization groups in a checkpoint's files: inputs of a linear that share a scale, whole in each rank's part."""

from __future__ import annotations

from penstock.core.model_config import StoredGroups
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.stored import GroupedTensor

_LOOKED_AT = "model.layers.0.self_attn.o_proj.weight"  # split by its inputs, and smaller than the others that are


def stored_groups(checkpoint: Checkpoint) -> StoredGroups | None:
    """Quantization groups of the first layer; the others of a file are like it. None: its weights are not grouped, or
    each output has one scale for all inputs, which may then be split anywhere."""
    if checkpoint.config.quantization not in ("int4", "int8") or _LOOKED_AT not in checkpoint.tensor_names():
        return None
    found = checkpoint.stored(_LOOKED_AT)
    if not isinstance(found, GroupedTensor):
        return None
    num_groups, is_ordered = found.scales.values.shape[1], found.order is not None
    if num_groups == 1 and not is_ordered:
        return None
    return StoredGroups(found.shape[1] // num_groups, is_ordered=is_ordered)
