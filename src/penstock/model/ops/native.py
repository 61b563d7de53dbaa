"""The operations in C, for the CPU: the same interface as `reference`, held equal to it by tests.

This module packs weights and passes pointers; what is computed, and on how many threads, is in `kernels/`.
Activations are float32. A row's result is bitwise the same whatever else is in the batch, however a prompt was
chunked, and for any number of threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int32, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, Fp8Weight, KVShape, LayerKV, Linear, Norm, Rope, Scaled, Stream, plain
from penstock.model.ops.build import KernelsUnavailable, build_kernels

# How weights and the cache are stored, and multiplied: in the order of `arithmetic_at` in product.c.
ARITHMETICS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,  # widened to float32 as they are read
    "bfloat16_dot": torch.bfloat16,  # activations are rounded to bfloat16 too, for the pair-product instruction
}
MOST_HEAD_DIM = 256


class _Layer(ctypes.Structure):
    """`struct layer` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "cos", "sin", "q_norm", "k_norm")),
        *((name, c_int32) for name in ("arithmetic", "block_size", "heads", "kv_heads", "dim", "window")),
        *((name, c_float) for name in ("scale", "norm_eps")),
    )


class _Batch(ctypes.Structure):
    """`struct batch` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "query_starts", "context_lens", "block_tables")),
        *((name, c_int32) for name in ("table_stride", "sequences", "tokens")),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "arithmetic_at": (c_void_p, (c_int,)),
    "pool_new": (c_void_p, (c_int,)),
    "pool_free": (None, (c_void_p,)),
    "linear_struct_bytes": (c_size_t, ()),
    "linear_bytes": (c_size_t, (c_int, c_int, c_int)),
    "linear_pack": (None, (c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int, c_int)),
    "linear_run": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "linear_lookup": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "rms_norm": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_float)),
    "silu_mul": (None, (c_void_p, c_void_p, c_void_p, c_int, c_int)),
    "key_block_bytes": (c_size_t, (c_int, c_int, c_int, c_int)),
    "value_block_bytes": (c_size_t, (c_int, c_int, c_int, c_int)),
    "attention_run": (None, (c_void_p, POINTER(_Layer), POINTER(_Batch), c_void_p, c_void_p)),
}


def _load_library() -> ctypes.CDLL:
    path = build_kernels()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"cannot load {path}: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class PackedWeight:
    """A weight in panels, and the C struct that describes it. Owns its memory, and keeps the thread pool alive."""

    def __init__(self, ops: NativeOps, weight: Tensor, bias: Tensor | None) -> None:
        self.library, self.pool, self._ops = ops.library, ops.pool, ops
        self.n, self.k = weight.shape
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._panels = _pages(self.library.linear_bytes(ops.arithmetic, self.n, self.k))
        self._struct = ctypes.create_string_buffer(self.library.linear_struct_bytes())
        self.pointer = ctypes.addressof(self._struct)
        source = weight.float().contiguous()
        with ops.packing:
            self.library.linear_pack(
                self.pool,
                self.pointer,
                ops.arithmetic,
                self._panels.data_ptr(),
                source.data_ptr(),
                _pointer(self._bias),
                self.n,
                self.k,
            )


class NativeLinear:
    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight
        self._run, self._pool, self._pointer, self._n = weight.library.linear_run, weight.pool, weight.pointer, weight.n

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        m = x.shape[0]
        y = x.new_empty(m, self._n)
        self._run(self._pool, self._pointer, x.data_ptr(), y.data_ptr(), m)
        return y


class NativeLookup:
    """The embedding, read from the panels of the head that it is tied to."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._weight
        ids = x.to(torch.int32).contiguous()
        out = torch.empty(ids.shape[0], weight.k)
        weight.library.linear_lookup(weight.pool, weight.pointer, ids.data_ptr(), out.data_ptr(), ids.shape[0])
        return out


class LayerCall:
    """What C must know of a layer; filled in when the layer first attends."""

    def __init__(self, arithmetic: int, keys: Tensor, values: Tensor, block_size: int) -> None:
        self.struct = _Layer(
            keys=keys.data_ptr(), values=values.data_ptr(), arithmetic=arithmetic, block_size=block_size
        )
        self.spec: AttentionSpec | None = None
        self.rope: Rope | None = None

    def describe(self, spec: AttentionSpec, rope: Rope) -> None:
        self.spec, self.rope = spec, rope  # kept: the struct points into their tensors
        struct = self.struct
        struct.cos, struct.sin = rope.cos.data_ptr(), rope.sin.data_ptr()
        struct.q_norm, struct.k_norm = _pointer(spec.q_norm), _pointer(spec.k_norm)
        struct.heads, struct.kv_heads, struct.dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        struct.window, struct.scale, struct.norm_eps = spec.window or 0, spec.scale, spec.norm_eps


@dataclass(frozen=True)
class NativeKV(LayerKV):
    """Keys and values as rows of bytes, one row per block."""

    call: LayerCall


class NativeOps:
    """Raises KernelsUnavailable where there is no compiler, or no such arithmetic on this processor."""

    def __init__(self, arithmetic: str = "float32", threads: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.weight_dtype = ARITHMETICS[arithmetic]
        self.activation_dtype = torch.float32
        self.kv_dtype = self.weight_dtype
        self.arithmetic = list(ARITHMETICS).index(arithmetic)
        self.library = _load_library()
        if not self.library.arithmetic_at(self.arithmetic):
            raise KernelsUnavailable(f"this processor has no instruction for {arithmetic}")
        self.pool = self.library.pool_new(threads or len(os.sched_getaffinity(0)))
        weakref.finalize(self, self.library.pool_free, self.pool)
        self.packing = threading.Lock()  # layers are loaded by several threads, and the pool serves one caller
        self._batch: Batch | None = None
        self._batch_struct = _Batch()

    def linear(self, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Linear:
        return NativeLinear(PackedWeight(self, plain(weight), bias))

    def head(self, table: Tensor) -> Linear:
        return self.linear(table)

    def embedding(self, table: Tensor) -> Linear:
        stored = table.to(self.weight_dtype)
        return lambda ids: F.embedding(ids, stored).float()

    def tied(self, table: Tensor) -> tuple[Linear, Linear]:
        packed = PackedWeight(self, table, None)
        return NativeLookup(packed), NativeLinear(packed)

    def rms_norm(self, stream: Stream, norm: Norm) -> Tensor:
        """The norm of the stream; what was pending is added to it."""
        residual, pending = stream.residual, stream.pending
        assert not isinstance(pending, Scaled)
        (m, n), out = residual.shape, torch.empty_like(residual)
        x, sums = (residual, None) if pending is None else (pending, residual)
        self.library.rms_norm(
            self.pool, x.data_ptr(), _pointer(sums), norm.weight.data_ptr(), out.data_ptr(), m, n, norm.eps
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
            keys = _pages(shape.num_blocks * key_bytes).view(shape.num_blocks, key_bytes)
            values = _pages(shape.num_blocks * value_bytes).view(shape.num_blocks, value_bytes)
            return NativeKV(keys, values, shape.block_size, LayerCall(self.arithmetic, keys, values, shape.block_size))

        return [layer() for _ in range(shape.num_layers)]

    def begin(self, batch: Batch) -> None:
        """Point C at the step's batch."""
        tensors = (batch.positions, batch.query_starts, batch.context_lens, batch.block_tables)
        assert all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in tensors)
        self._batch = batch  # kept: the struct points into its tensors
        self._batch_struct = _Batch(
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


def _pages(num_bytes: int) -> Tensor:
    """Zeroed bytes, aligned to a page, that cost memory only once they are touched."""
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
