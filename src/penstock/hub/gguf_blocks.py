"""GGUF's blocks of small integers as integers in groups, the way all other formats leave the hub.

A block has 32 values, or 256 in eight or sixteen groups; scales and minimums of groups may be small integers
themselves, times a scale of the block. Types that are no such thing (a codebook, other sizes) are not here: they are
dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as Type

from penstock.hub.stored import GroupedTensor, StoredTensor, packed

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]
_SHIFTS = np.array([[0], [2], [4], [6]], np.uint8)


def grouped(blocks: Bytes, type: Type, rows: int) -> GroupedTensor | None:
    """blocks: [number, bytes of a block], row by row; None: the type has no groups of integers."""
    read = _READERS.get(type)
    return None if read is None else read(blocks, rows)


def _halves(column: Bytes) -> Array:
    return np.ascontiguousarray(column).view(np.float16)


def _nibbles(quants: Bytes) -> Bytes:
    """[blocks, 16 n] -> [blocks, 32 n]: of every 16 bytes the lower halves, then the upper ones."""
    return np.stack((quants & 15, quants >> 4), axis=1).reshape(quants.shape[0], -1)


def _four(values: Array, rows: int, scales: Array, minimums: Array | None = None) -> GroupedTensor:
    return GroupedTensor(
        packed(np.ascontiguousarray(values.astype(np.uint8).reshape(rows, -1))),
        4,
        _per_group(scales, rows),
        minimums=None if minimums is None else _per_group(minimums, rows),
    )


def _eight(values: Array, rows: int, scales: Array, minimums: Array | None = None) -> GroupedTensor:
    """Values count from 128 where there are no minimums, and from 0 where there are."""
    return GroupedTensor(
        np.ascontiguousarray(values.astype(np.uint8).reshape(rows, -1)),
        8,
        _per_group(scales, rows),
        minimums=None if minimums is None else _per_group(minimums, rows),
    )


def _per_group(values: Array, rows: int) -> StoredTensor:
    stored = np.ascontiguousarray(values.reshape(rows, -1))
    return StoredTensor(stored, "F16" if stored.dtype == np.float16 else "F32")


def _q4_0(blocks: Bytes, rows: int) -> GroupedTensor:
    return _four(_nibbles(blocks[:, 2:]), rows, _halves(blocks[:, :2]))


def _q4_1(blocks: Bytes, rows: int) -> GroupedTensor:
    return _four(_nibbles(blocks[:, 4:]), rows, _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _fifth_bits(packed_bits: Bytes) -> Bytes:
    bits = np.ascontiguousarray(packed_bits).view("<u4").reshape(-1, 1) >> np.arange(32, dtype=np.uint32)
    fifth: Bytes = ((bits & 1) << 4).astype(np.uint8)
    return fifth


def _q5_0(blocks: Bytes, rows: int) -> GroupedTensor:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _eight(values + 112, rows, _halves(blocks[:, :2]))  # counted from 16


def _q5_1(blocks: Bytes, rows: int) -> GroupedTensor:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _eight(values, rows, _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q8_0(blocks: Bytes, rows: int) -> GroupedTensor:
    return _eight(blocks[:, 2:] ^ 128, rows, _halves(blocks[:, :2]))


def _two_bits(quants: Bytes) -> Array:
    """[blocks, 32 n] -> [blocks, 128 n]: of every 32 bytes the lowest two bits, then the next."""
    parts = (quants.reshape(quants.shape[0], -1, 1, 32) >> _SHIFTS) & 3
    return parts.reshape(quants.shape[0], -1)


def _q2_k(blocks: Bytes, rows: int) -> GroupedTensor:
    scales, minimums = blocks[:, :16] & 15, blocks[:, :16] >> 4
    halves = _halves(blocks[:, 80:]).astype(np.float32)  # [blocks, 2]
    return _four(_two_bits(blocks[:, 16:80]), rows, halves[:, :1] * scales, -halves[:, 1:] * minimums)


def _q3_k(blocks: Bytes, rows: int) -> GroupedTensor:
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [blocks, 8, 32]
    values = (_two_bits(blocks[:, 32:96]) | (third.reshape(-1, 256) << 2)) + 4  # counted from 4
    low, high = blocks[:, None, 96:104] >> _SHIFTS[::2], blocks[:, None, 104:108] >> _SHIFTS
    scales = (low.reshape(-1, 16) & 15) | ((high.reshape(-1, 16) & 3) << 4)
    return _four(values, rows, _halves(blocks[:, 108:]).astype(np.float32) * (scales.astype(np.int8) - 32))


def _six_bits(twelve: Bytes) -> tuple[Array, Array]:
    """Eight scales and eight minimums of 6 bits: four of each in the lower bits of eight bytes; of the others the lower
    halves are in the last four, and two bits each above the first."""
    scales, minimums, rest = twelve[:, :4], twelve[:, 4:8], twelve[:, 8:]
    return (
        np.concatenate([scales & 63, (rest & 15) | (scales >> 6 << 4)], axis=1),
        np.concatenate([minimums & 63, (rest >> 4) | (minimums >> 6 << 4)], axis=1),
    )


def _k_scales(blocks: Bytes) -> tuple[Array, Array]:
    """[blocks, 8] float32: the scales and what is added, of Q4_K and Q5_K."""
    scales, minimums = _six_bits(blocks[:, 4:16])
    return (
        _halves(blocks[:, :2]).astype(np.float32) * scales,
        -_halves(blocks[:, 2:4]).astype(np.float32) * minimums,
    )


def _k_nibbles(quants: Bytes) -> Bytes:
    """[blocks, 128] -> [blocks, 256]: of every 32 bytes the lower halves, then the upper ones."""
    parts = quants.reshape(quants.shape[0], 4, 32)
    return np.stack((parts & 15, parts >> 4), axis=2).reshape(quants.shape[0], 256)


def _q4_k(blocks: Bytes, rows: int) -> GroupedTensor:
    return _four(_k_nibbles(blocks[:, 16:]), rows, *_k_scales(blocks))


def _q5_k(blocks: Bytes, rows: int) -> GroupedTensor:
    fifth = (blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8)) & 1  # [blocks, 32, 8]: bit i is of group i
    values = _k_nibbles(blocks[:, 48:]) | (fifth.swapaxes(1, 2).reshape(-1, 256) << 4)
    return _eight(values, rows, *_k_scales(blocks))


def _q6_k(blocks: Bytes, rows: int) -> GroupedTensor:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    lower = np.stack((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)  # of a half: 32, 32, and their upper halves
    upper = (high >> (2 * np.arange(4, dtype=np.uint8)).reshape(1, 1, 4, 1)) & 3
    values = (lower | (upper << 4)).reshape(-1, 256) + np.uint8(96)  # counted from 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _eight(values, rows, _halves(blocks[:, 208:]).astype(np.float32) * scales)


_READERS: dict[Type, Callable[[Bytes, int], GroupedTensor]] = {
    Type.Q2_K: _q2_k,
    Type.Q3_K: _q3_k,
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
}
