"""The operations in C, for the CPU: the same interface as `reference`, held equal to it by tests.

This module packs weights and passes pointers; what is computed, and on how many threads, is in `kernels/`.
Activations are float32. A row's result is bitwise the same whatever else is in the batch, however a prompt was
chunked, and for any number of threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, KVShape, LayerKV, Linear, Norm, Rope, Scaled, Stream
from penstock.model.ops import library as c
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.library import ARITHMETICS, LOW_BIT, MOST_HEAD_DIM, load_library, pages, pointer
from penstock.model.ops.panels import NativeLinear, NativeLookup, PackedWeight, packed_low_bit
from penstock.model.quantized import Weight, plain


class LayerCall:
    """What C must know of a layer; filled in when the layer first attends."""

    def __init__(self, arithmetic: int, keys: Tensor, values: Tensor, block_size: int) -> None:
        self.struct = c.Layer(
            keys=keys.data_ptr(), values=values.data_ptr(), arithmetic=arithmetic, block_size=block_size
        )
        self.spec: AttentionSpec | None = None
        self.rope: Rope | None = None

    def describe(self, spec: AttentionSpec, rope: Rope) -> None:
        self.spec, self.rope = spec, rope  # kept: the struct points into their tensors
        struct = self.struct
        struct.cos, struct.sin = rope.cos.data_ptr(), rope.sin.data_ptr()
        struct.q_norm, struct.k_norm = pointer(spec.q_norm), pointer(spec.k_norm)
        struct.heads, struct.kv_heads, struct.dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        struct.window, struct.scale, struct.norm_eps = spec.window or 0, spec.scale, spec.norm_eps


@dataclass(frozen=True)
class NativeKV(LayerKV):
    """Keys and values as rows of bytes, one row per block."""

    call: LayerCall


class NativeOps:
    """Raises KernelsUnavailable where there is no compiler, or no such arithmetic on this processor.

    `keeps` names the bits of quantized weights that stay as they are: their products are of integers, and activations
    are rounded to 8 bits for them. All other weights are widened.
    """

    def __init__(
        self, arithmetic: str = "float32", threads: int | None = None, keeps: frozenset[int] = frozenset()
    ) -> None:
        self.device = torch.device("cpu")
        self.weight_dtype = ARITHMETICS[arithmetic]
        self.activation_dtype = torch.float32
        self.kv_dtype = self.weight_dtype
        self.arithmetic = list(ARITHMETICS).index(arithmetic)
        self.library = load_library()
        if not self.library.arithmetic_at(self.arithmetic):
            raise KernelsUnavailable(f"this processor has no instruction for {arithmetic}")
        for bits in keeps:
            if not self.library.arithmetic_at(LOW_BIT[bits]):
                raise KernelsUnavailable(f"this processor has no instruction for weights of {bits} bits")
        self.keeps = keeps
        self.pool = self.library.pool_new(threads or len(os.sched_getaffinity(0)))
        weakref.finalize(self, self.library.pool_free, self.pool)
        self.packing = threading.Lock()  # layers are loaded by several threads, and the pool serves one caller
        self._batch: Batch | None = None
        self._batch_struct = c.Batch()

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return NativeLinear(self._packed(weight, bias))

    def head(self, table: Weight) -> Linear:
        return self.linear(table)

    def embedding(self, table: Weight) -> Linear:
        if not isinstance(table, Tensor) and (packed := packed_low_bit(self, table, None, self.keeps)):
            return NativeLookup(packed)
        stored = plain(table).to(self.weight_dtype)
        return lambda ids: F.embedding(ids, stored).float()

    def tied(self, table: Weight) -> tuple[Linear, Linear]:
        packed = self._packed(table, None)
        return NativeLookup(packed), NativeLinear(packed)

    def _packed(self, weight: Weight, bias: Tensor | None) -> PackedWeight:
        if kept := packed_low_bit(self, weight, bias, self.keeps):
            return kept
        wide = plain(weight)
        return PackedWeight(self, self.arithmetic, wide.shape, bias).fill(wide)

    def rms_norm(self, stream: Stream, norm: Norm) -> Tensor:
        """The norm of the stream; what was pending is added to it."""
        residual, pending = stream.residual, stream.pending
        assert not isinstance(pending, Scaled)
        (m, n), out = residual.shape, torch.empty_like(residual)
        x, sums = (residual, None) if pending is None else (pending, residual)
        self.library.rms_norm(
            self.pool, x.data_ptr(), pointer(sums), norm.weight.data_ptr(), out.data_ptr(), m, n, norm.eps
        )
        stream.pending = None
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        m, n = gate_up.shape
        out = gate_up.new_empty(m, n // 2)
        self.library.silu_mul(self.pool, gate_up.data_ptr(), out.data_ptr(), m, n // 2)
        return out

    def norm_linear(self, stream: Stream, norm: Norm, linear: Linear) -> Tensor:
        return linear(self.rms_norm(stream, norm))

    def add_linear(self, stream: Stream, x: Tensor, linear: Linear) -> None:
        stream.pending = linear(x)  # every sum is followed by a norm, which adds it on its way

    def feed_forward(self, stream: Stream, norm: Norm, gate_up: Linear, down: Linear) -> None:
        self.add_linear(stream, self.silu_mul(self.norm_linear(stream, norm, gate_up)), down)

    def allocate_kv(self, shape: KVShape) -> list[LayerKV]:
        if shape.head_dim % 8 or shape.head_dim > MOST_HEAD_DIM:
            raise ModelUnsupported(f"head size {shape.head_dim} is no multiple of 8 up to {MOST_HEAD_DIM}")
        sizes = (self.arithmetic, shape.block_size, shape.num_kv_heads, shape.head_dim)
        key_bytes, value_bytes = self.library.key_block_bytes(*sizes), self.library.value_block_bytes(*sizes)

        def layer() -> NativeKV:
            keys = pages(shape.num_blocks * key_bytes).view(shape.num_blocks, key_bytes)
            values = pages(shape.num_blocks * value_bytes).view(shape.num_blocks, value_bytes)
            return NativeKV(keys, values, shape.block_size, LayerCall(self.arithmetic, keys, values, shape.block_size))

        return [layer() for _ in range(shape.num_layers)]

    def begin(self, batch: Batch) -> None:
        """Point C at the step's batch."""
        tensors = (batch.positions, batch.query_starts, batch.context_lens, batch.block_tables)
        assert all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in tensors)
        self._batch = batch  # kept: the struct points into its tensors
        self._batch_struct = c.Batch(
            *(tensor.data_ptr() for tensor in tensors),
            batch.block_tables.shape[1],
            batch.num_sequences,
            batch.num_tokens,
        )

    def attention(self, qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch) -> Tensor:
        assert isinstance(kv, NativeKV)
        call = kv.call
        if call.spec is not spec or call.rope is not rope:
            call.describe(spec, rope)
        assert self._batch is batch, "another step was begun"
        out = qkv.new_empty(qkv.shape[0], spec.num_heads * spec.head_dim)
        self.library.attention_run(self.pool, call.struct, self._batch_struct, qkv.data_ptr(), out.data_ptr())
        return out

    def copy_blocks(self, kv: list[LayerKV], pairs: Sequence[tuple[int, int]]) -> None:
        sources, destinations = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
        for layer in kv:
            for cache in (layer.keys, layer.values):
                cache[destinations] = cache[sources]
