"""A layer's attention as C knows it: where its cache lies, and what is constant about it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.model.ops import AttentionSpec, KVShape, LayerKV, Rope
from penstock.model.ops import library as c
from penstock.model.ops.library import pointer


class LayerCall:
    """Description of a layer for C; filled in when the layer first attends."""

    def __init__(self, arithmetic: int, keys: Tensor, values: Tensor | None, shape: KVShape) -> None:
        self.struct = c.Layer(
            keys=keys.data_ptr(),
            values=pointer(values),
            arithmetic=arithmetic,
            block_size=shape.block_size,
            place=shape.tokens.place,
            ranks=shape.tokens.size,
        )
        self.counts_sinks = shape.tokens.place == 0  # once, of ranks that share out tokens
        self.spec: AttentionSpec | None = None
        self.rope: Rope | None = None

    def describe(self, spec: AttentionSpec, rope: Rope) -> None:
        self.spec, self.rope = spec, rope  # kept: the struct points into their tensors
        struct = self.struct
        is_rotated = spec.value_dim is not None  # before C sees them
        struct.cos, struct.sin = (None, None) if is_rotated else (rope.cos.data_ptr(), rope.sin.data_ptr())
        struct.value_dim = spec.value_dim or 0
        struct.q_norm, struct.k_norm = pointer(spec.q_norm), pointer(spec.k_norm)
        struct.sinks = pointer(spec.sinks) if self.counts_sinks else None
        struct.heads, struct.kv_heads, struct.dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        window = spec.window or 0
        struct.window = -window if spec.in_chunks else window
        struct.scale, struct.norm_eps = spec.scale, spec.norm_eps
        struct.cap = spec.cap or 0.0


@dataclass(frozen=True)
class NativeKV(LayerKV):
    """Keys and values as rows of bytes, one row per block."""

    call: LayerCall
