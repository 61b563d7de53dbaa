"""The compiled kernels as ctypes see them: structs and signatures. Knows what C is told, not why."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from penstock.model.ops.build import KernelsUnavailable, build_kernels

# Formats in which weights and the cache are stored, and multiplied: in the order of `arithmetic_at` in product.c.
ARITHMETICS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,  # widened to float32 as they are read
    "bfloat16_dot": torch.bfloat16,  # activations are rounded to bfloat16 too, for the pair-product instruction
}
LOW_BIT = {4: 3, 8: 4}  # the places behind them: linear weights of so many bits
CACHED_INT8 = (5, 6)  # and behind those: a cache of 8-bit integers, as fast as it can be, and for any processor
LOW_BIT_CENTRED = {4: 7, 8: 8}  # weights that count from the middle, without minimums
LOW_BIT_FINE = 9  # of 8 bits, with a scale and a minimum for every 16
LOW_BIT_MXFP4 = 10  # numbers of 4 bits, looked up, with a power of two for every 32
GROUP = 32  # columns of a low-bit weight that share a scale; a multiple of it, or half of it if need be
MAX_HEAD_DIM = 576


class Layer(ctypes.Structure):
    """`struct layer` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "cos", "sin", "q_norm", "k_norm", "sinks")),
        *((name, c_int32) for name in ("arithmetic", "block_size", "heads", "kv_heads", "dim", "window")),
        *((name, c_float) for name in ("scale", "norm_eps", "cap")),
        ("settled", c_int32),
        ("place", c_int32),
        ("ranks", c_int32),
        ("value_dim", c_int32),
    )


class Batch(ctypes.Structure):
    """`struct batch` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "query_starts", "context_lens", "block_tables")),
        *((name, c_int32) for name in ("table_stride", "sequences", "tokens")),
    )


class Source(ctypes.Structure):
    """`struct source` of linear.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "residual", "norm")),
        ("eps", c_float),
        ("gated", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
    )


class DecoderLayer(ctypes.Structure):
    """`struct decoder_layer` of decoder.c."""

    _fields_ = (
        ("attention", POINTER(Layer)),
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down", "attention_norm", "mlp_norm")),
        *((name, c_float) for name in ("attention_eps", "mlp_eps")),
    )


class Ranks(ctypes.Structure):
    """`struct ranks` of ranks.h."""

    _fields_ = (
        ("base", c_void_p),
        ("slot_bytes", c_size_t),
        ("timeout_ns", c_int64),
        ("rank", c_int32),
        ("size", c_int32),
        ("round", c_uint32),
        ("lost", c_int32),
        ("spent_ns", c_int64),
    )


class Experts(ctypes.Structure):
    """`struct experts` of experts.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("linears", "starts", "rows", "weights")),
        *((name, c_int32) for name in ("count", "hidden")),
        *((name, c_float) for name in ("alpha", "limit")),
    )


class Codes(ctypes.Structure):
    """`struct codes` of low_bit.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "scales", "minimums", "order")),
        ("groups", c_int32),
        ("unit", c_float),
        ("precise", c_int32),
    )


class Delta(ctypes.Structure):
    """`struct delta` of delta.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("projected", "ba", "taps", "decay", "dt_bias", "norm", "conv", "states")),
        *((name, c_void_p) for name in ("query_starts", "positions", "slots", "out", "scratch")),
        *((name, c_int32) for name in ("sequences", "key_heads", "served", "key_dim", "value_dim", "kernel")),
        ("norm_eps", c_float),
    )


class AdapterPart(ctypes.Structure):
    """`struct adapter_part` of adapters.c."""

    _fields_ = (("b", c_void_p), ("rank", c_int32), ("column", c_int32))


class AdapterPair(ctypes.Structure):
    """`struct adapter_pair` of adapters.c."""

    _fields_ = (("a", c_void_p), ("parts", c_void_p), ("num_parts", c_int32))


class AdapterRows(ctypes.Structure):
    """`struct adapter_rows` of adapters.c."""

    _fields_ = (("pairs", c_void_p), ("rows", c_void_p), ("count", c_int32))


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "arithmetic_at": (c_void_p, (c_int,)),
    "pool_new": (c_void_p, (c_int,)),
    "pool_free": (None, (c_void_p,)),
    "linear_struct_bytes": (c_size_t, ()),
    "linear_bytes": (c_size_t, (c_int, c_int, c_int)),
    "linear_pack": (None, (c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int, c_int)),
    "linear_pack_codes": (None, (c_void_p, c_void_p, c_int, c_void_p, POINTER(Codes), c_void_p, c_int, c_int)),
    "linear_describe": (
        None,
        (c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p, c_int, c_int, c_float),
    ),
    "linear_run": (None, (c_void_p, c_void_p, POINTER(Source), c_void_p, c_int)),
    "linear_lookup": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "rms_norm": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_float)),
    "silu_mul": (None, (c_void_p, c_void_p, c_void_p, c_int, c_int)),
    "gelu_mul": (None, (c_void_p, c_void_p, c_void_p, c_int, c_int)),
    "clamped_swiglu": (None, (c_void_p, c_void_p, c_void_p, c_int, c_int, c_float, c_float)),
    "sigmoid_mul": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int)),
    "delta_run": (None, (c_void_p, POINTER(Delta))),
    "cap": (None, (c_void_p, c_void_p, c_int, c_int, c_float)),
    "key_block_bytes": (c_size_t, (c_int, c_int, c_int, c_int)),
    "value_block_bytes": (c_size_t, (c_int, c_int, c_int, c_int)),
    "layers_run": (
        c_int,
        (c_void_p, POINTER(Ranks), POINTER(DecoderLayer), c_int, POINTER(Batch), c_void_p, c_void_p),
    ),
    "ranks_bytes": (c_size_t, (c_int, c_size_t)),
    "ranks_sum": (c_int, (c_void_p, POINTER(Ranks), c_void_p, c_void_p, c_size_t)),
    "ranks_gather": (c_int, (POINTER(Ranks), c_void_p, c_void_p, c_size_t, c_size_t, c_size_t, c_int)),
    "ranks_exchange": (c_int, (POINTER(Ranks), c_void_p, c_void_p, c_size_t, c_size_t, c_int)),
    "ranks_give_up": (None, (POINTER(Ranks), c_int)),
    "adapters_run": (None, (c_void_p, c_void_p, c_int, c_int, c_void_p, c_int, c_void_p, c_int)),
    "experts_run": (None, (c_void_p, POINTER(Experts), c_void_p, c_void_p)),
    "attention_run": (c_int, (c_void_p, POINTER(Ranks), POINTER(Layer), POINTER(Batch), c_void_p, c_void_p)),
    "attention_part": (None, (c_void_p, POINTER(Layer), POINTER(Batch), c_void_p, c_void_p, c_void_p)),
    "attention_merge": (None, (c_void_p, POINTER(Layer), c_void_p, c_void_p, c_int)),
    "kv_copy": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
    "kv_hash": (c_uint64, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_uint64)),
}


def load_library() -> ctypes.CDLL:
    path = build_kernels()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"cannot load {path}: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
