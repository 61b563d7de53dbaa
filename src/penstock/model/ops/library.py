"""The compiled kernels as ctypes see them: structs and signatures. Knows what C is told, not why."""

from __future__ import annotations

import ctypes
import mmap
from ctypes import POINTER, c_float, c_int, c_int32, c_size_t, c_void_p
from typing import Any

import torch
from torch import Tensor

from penstock.model.ops.build import KernelsUnavailable, build_kernels

# How weights and the cache are stored, and multiplied: in the order of `arithmetic_at` in product.c.
ARITHMETICS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,  # widened to float32 as they are read
    "bfloat16_dot": torch.bfloat16,  # activations are rounded to bfloat16 too, for the pair-product instruction
}
LOW_BIT = {4: 3, 8: 4}  # the places behind them: linear weights of so many bits
GROUP = 32  # columns of such a weight that share a scale
MOST_HEAD_DIM = 256


class Layer(ctypes.Structure):
    """`struct layer` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "cos", "sin", "q_norm", "k_norm")),
        *((name, c_int32) for name in ("arithmetic", "block_size", "heads", "kv_heads", "dim", "window")),
        *((name, c_float) for name in ("scale", "norm_eps")),
    )


class Batch(ctypes.Structure):
    """`struct batch` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "query_starts", "context_lens", "block_tables")),
        *((name, c_int32) for name in ("table_stride", "sequences", "tokens")),
    )


class Codes(ctypes.Structure):
    """`struct codes` of low_bit.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "scales", "minimums")),
        ("groups", c_int32),
        ("unit", c_float),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "arithmetic_at": (c_void_p, (c_int,)),
    "pool_new": (c_void_p, (c_int,)),
    "pool_free": (None, (c_void_p,)),
    "linear_struct_bytes": (c_size_t, ()),
    "linear_bytes": (c_size_t, (c_int, c_int, c_int)),
    "linear_pack": (None, (c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int, c_int)),
    "linear_pack_codes": (None, (c_void_p, c_void_p, c_int, c_void_p, POINTER(Codes), c_void_p, c_int, c_int)),
    "linear_run": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "linear_lookup": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "rms_norm": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_float)),
    "silu_mul": (None, (c_void_p, c_void_p, c_void_p, c_int, c_int)),
    "key_block_bytes": (c_size_t, (c_int, c_int, c_int, c_int)),
    "value_block_bytes": (c_size_t, (c_int, c_int, c_int, c_int)),
    "attention_run": (None, (c_void_p, POINTER(Layer), POINTER(Batch), c_void_p, c_void_p)),
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


def pages(num_bytes: int) -> Tensor:
    """Zeroed bytes, aligned to a page, that cost memory only once they are touched."""
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
