"""All layers of a model as C sees them: an array that one call runs through. Knows pointers and who outlives them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from penstock.model.ops import Layer, LayerKV, Linear
from penstock.model.ops import library as c
from penstock.model.ops.layer_call import NativeKV
from penstock.model.ops.panels import NativeLinear
from penstock.model.ops.shared_memory import SharedMemoryRanks
from penstock.model.ranks import SummedLinear


class Program:
    """Layers of one model over one cache. Valid for as long as both are the ones it was made of."""

    def __init__(self, layers: Sequence[Layer], kv: Sequence[LayerKV]) -> None:
        self._layers, self._kv = layers, kv
        self.ranks = _ranks_of(layers)  # those that share the layers; None: this one has all of them
        structs = (c.DecoderLayer * len(layers))()
        is_plain = all(_fill(*each, self.ranks) for each in zip(structs, layers, kv, strict=True))
        self.structs = structs if is_plain else None  # None: some layer is more than a plain decoder layer

    def is_of(self, layers: Sequence[Layer], kv: Sequence[LayerKV]) -> bool:
        return self._layers is layers and self._kv is kv


def _ranks_of(layers: Sequence[Layer]) -> SharedMemoryRanks | None:
    parts = layers[0].parts
    if parts is None or not isinstance(parts.down, SummedLinear):
        return None
    return parts.down.ranks if isinstance(parts.down.ranks, SharedMemoryRanks) else None


def _part(linear: Linear, ranks: SharedMemoryRanks | None) -> Linear:
    """The part of a linear that a rank has, where C sums the parts."""
    return linear.linear if ranks is not None and isinstance(linear, SummedLinear) else linear


def _fill(struct: c.DecoderLayer, layer: Layer, kv: LayerKV, ranks: SharedMemoryRanks | None) -> bool:
    """Whether the layer could be described."""
    parts = layer.parts
    if parts is None:
        return False
    assert isinstance(kv, NativeKV)
    output, down = _part(parts.output, ranks), _part(parts.down, ranks)
    linears = {"qkv": parts.qkv, "output": output, "gate_up": parts.gate_up, "down": down}
    for name, linear in linears.items():
        if not isinstance(linear, NativeLinear):
            return False
        setattr(struct, name, linear.weight.pointer)
    kv.call.describe(parts.spec, parts.rope)
    struct.attention = ctypes.pointer(kv.call.struct)
    struct.attention_norm, struct.attention_eps = parts.attention_norm.weight.data_ptr(), parts.attention_norm.eps
    struct.mlp_norm, struct.mlp_eps = parts.mlp_norm.weight.data_ptr(), parts.mlp_norm.eps
    return True
