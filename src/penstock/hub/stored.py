"""A tensor in the number format of its file, and what it is in float32. Knows no file format and no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ModelCorrupt, ModelUnsupported

NumberFormat = Literal["F32", "BF16", "F16", "F8_E4M3", "I8"]
FloatArray = npt.NDArray[np.float32]
MXFP4_GROUP = 32  # columns that share a scale
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by their 4 bits

# numpy has neither bfloat16 nor float8: such arrays hold the bits.
STORED_AS: dict[NumberFormat, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F8_E4M3": np.dtype("u1"),
    "I8": np.dtype("i1"),
}


@dataclass(frozen=True)
class Part:
    """Rows and columns of a weight, or numbers of a vector: what one of several ranks has of it."""

    shape: tuple[int, ...]  # of the whole
    rows: slice
    columns: slice | None = None  # None: all of them, or there are none

    def check(self, shape: tuple[int, ...], name: str) -> None:
        if shape != self.shape:
            raise ModelCorrupt(f"tensor '{name}' is {list(shape)}, not {list(self.shape)}")

    @property
    def column_range(self) -> tuple[int, int]:
        return (0, self.shape[1]) if self.columns is None else (self.columns.start, self.columns.stop)

    def groups(self, count: int) -> slice | None:
        """The part's groups of inputs, of so many of equal size; None: it begins or ends within one. A single group,
        which has all inputs, is every part's."""
        (first, last), size = self.column_range, self.shape[1] // count
        if count == 1:
            return slice(0, 1)
        return None if first % size or last % size else slice(first // size, last // size)


@dataclass(frozen=True)
class StoredTensor:
    values: npt.NDArray[Any]  # C-contiguous, of the type in STORED_AS; maybe a read-only view of a mapped file
    format: NumberFormat
    scales: FloatArray | None = None  # [rows]: what each row of an F8_E4M3 or I8 weight is to be multiplied with
    input_scale: float | None = None  # F8_E4M3: what activations are divided by; None: by what each row needs

    def widened(self) -> FloatArray:
        """The numbers themselves, in float32; a float32 tensor is not copied."""
        if self.format == "BF16":
            return _widen_bfloat16(self.values)
        wide: FloatArray
        if self.format == "F8_E4M3":
            wide = e4m3_values()[self.values]
        else:
            wide = self.values.astype(np.float32, copy=self.scales is not None)
        if self.scales is not None:
            wide *= self.scales[:, None]
        return wide

    def part(self, part: Part, name: str) -> StoredTensor:
        """Rows are a view: of a mapped file, no others are read."""
        part.check(self.values.shape, name)
        scales = None if self.scales is None else self.scales[part.rows]
        return replace(self, values=_cut(self.values, part), scales=scales)


@dataclass(frozen=True)
class GroupedTensor:
    """A weight in 4- or 8-bit integers: (value - zero) * scale, or value * scale + minimum, by groups of columns.

    However a file packs them, here the values of a row lie one behind the other. All groups have the same size.
    """

    values: npt.NDArray[np.uint8]  # [rows, columns]; 4 bits: [rows, columns / 2], the first of two in the lower half
    bits: Literal[4, 8]
    scales: StoredTensor  # [rows, groups] in a float format
    zeros: npt.NDArray[np.uint8] | None = None  # [rows, groups]; None: the middle, 8 or 128
    minimums: StoredTensor | None = None  # [rows, groups]
    order: npt.NDArray[np.int64] | None = None  # [columns]: column i of `values` is column order[i] of the weight

    def widened(self) -> FloatArray:
        rows, groups = self.scales.values.shape
        wide = integers(self).astype(np.float32).reshape(rows, groups, -1)
        scales = self.scales.widened()[:, :, None]
        if self.minimums is not None:
            wide = wide * scales + self.minimums.widened()[:, :, None]
        else:
            zeros = (
                np.float32(1 << (self.bits - 1)) if self.zeros is None else self.zeros[:, :, None].astype(np.float32)
            )
            wide = (wide - zeros) * scales
        stored: FloatArray = wide.reshape(rows, -1)
        if self.order is None:
            return stored
        plain = np.empty_like(stored)
        plain[:, self.order] = stored
        return plain

    @property
    def shape(self) -> tuple[int, int]:
        rows, stored = self.values.shape
        return rows, stored * 8 // self.bits

    def part(self, part: Part, name: str) -> GroupedTensor:
        """Whole groups only: the scales of a group that is cut would be of no rank alone. A group of all inputs,
        however, is of every part: its scales follow the outputs."""
        part.check(self.shape, name)
        (first, last), columns = part.column_range, self.shape[1]
        is_whole = (first, last) == (0, columns)
        if self.order is not None and not is_whole:
            raise ModelUnsupported(
                f"tensor '{name}' cannot be split by its inputs: they are stored in an order of its own (act-order)"
            )
        own = part.groups(self.scales.values.shape[1])
        if own is None:
            group = columns // self.scales.values.shape[1]
            raise ModelUnsupported(
                f"tensor '{name}' cannot be split at input {first if first % group else last}: "
                f"its groups of {group} inputs would be cut. Use fewer ranks, or a model with smaller groups"
            )
        per_byte = 8 // self.bits
        if first % per_byte or last % per_byte:
            at = first if first % per_byte else last
            raise ModelUnsupported(f"tensor '{name}' cannot be split at input {at}: two inputs share a byte")
        groups = Part(self.scales.values.shape, part.rows, own)
        packed = Part(self.values.shape, part.rows, slice(first * self.bits // 8, last * self.bits // 8))
        return replace(
            self,
            values=_cut(self.values, packed),
            scales=self.scales.part(groups, name),
            zeros=None if self.zeros is None else _cut(self.zeros, groups),
            minimums=None if self.minimums is None else self.minimums.part(groups, name),
        )


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A weight in MXFP4: numbers of 4 bits (e2m1), with a power of two for every 32 columns."""

    values: npt.NDArray[np.uint8]  # [rows, columns / 2], the first of two in the lower half
    scales: npt.NDArray[np.uint8]  # [rows, columns / 32]: exponents, which count from -127 (e8m0)

    def widened(self) -> FloatArray:
        wide = E2M1[unpacked(self.values)].reshape(*self.scales.shape, MXFP4_GROUP)
        found: FloatArray = np.ldexp(wide, self.scales[:, :, None].astype(np.int32) - 127).reshape(self.shape)
        return found

    @property
    def shape(self) -> tuple[int, int]:
        rows, stored = self.values.shape
        return rows, stored * 2

    def part(self, part: Part, name: str) -> Mxfp4Tensor:
        """Whole groups of inputs only: each group has one scale."""
        part.check(self.shape, name)
        first, last = part.column_range
        if first % MXFP4_GROUP or last % MXFP4_GROUP:
            cut = first if first % MXFP4_GROUP else last
            raise ModelUnsupported(
                f"tensor '{name}' cannot be split at input {cut}: its groups of {MXFP4_GROUP} inputs (MXFP4) would be "
                "cut. Use fewer ranks, or share out whole experts (ep)"
            )
        packed = Part(self.values.shape, part.rows, slice(first // 2, last // 2))
        groups = Part(self.scales.shape, part.rows, slice(first // MXFP4_GROUP, last // MXFP4_GROUP))
        return Mxfp4Tensor(_cut(self.values, packed), _cut(self.scales, groups))


Stored = StoredTensor | GroupedTensor | Mxfp4Tensor


def _cut(array: npt.NDArray[Any], part: Part) -> npt.NDArray[Any]:
    rows = array[part.rows]
    return rows if part.columns is None else np.ascontiguousarray(rows[:, part.columns])


def integers(weight: GroupedTensor) -> npt.NDArray[np.uint8]:
    """[rows, columns]: the values, one per byte, in the stored order of columns."""
    return unpacked(weight.values) if weight.bits == 4 else weight.values


def unpacked(pairs: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[rows, columns / 2] -> [rows, columns]: two values of 4 bits from every byte."""
    return np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(pairs.shape[0], -1)


def packed(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[rows, columns], all under 16 -> [rows, columns / 2]"""
    return np.ascontiguousarray(values[:, ::2] | (values[:, 1::2] << 4))


def narrow_bfloat16(values: FloatArray) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
        rounded[is_nan] = 0x7FC0
    return rounded


def _widen_bfloat16(bits: npt.NDArray[Any]) -> FloatArray:
    """A bfloat16 is the upper half of a float32."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


@cache
def e4m3_values() -> FloatArray:
    """Values of the 256 bit patterns: sign, four bits of exponent, three of mantissa; no infinities."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    magnitude[bits & 0x7F == 0x7F] = np.nan
    return np.where(bits & 0x80, -magnitude, magnitude).astype(np.float32)
