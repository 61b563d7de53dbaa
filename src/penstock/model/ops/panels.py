"""Linear weights in panels, as the kernels read them: of floats, or of integers of 4 or 8 bits that stay so.

Knows how a weight is handed to C; what is done with it there is in `kernels/`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.model.ops.library import (
    GROUP,
    LOW_BIT,
    LOW_BIT_CENTRED,
    LOW_BIT_FINE,
    LOW_BIT_MXFP4,
    Codes,
    Source,
    pointer,
)
from penstock.model.ops.memory import Arena
from penstock.model.quantized.grouped import GroupedWeight
from penstock.model.quantized.int8 import Int8Weight
from penstock.model.quantized.mxfp4 import Mxfp4Weight

_LARGEST_HALF = 2.0**15  # as large as scales may become: the bits below are for the small ones


class Kernels(Protocol):
    """Resources of the operations that packing needs, and that a packed weight keeps alive."""

    library: ctypes.CDLL
    pool: int
    arena: Arena
    packing: threading.Lock  # layers are loaded by several threads; the pool serves one caller, and so does the arena


class PackedWeight:
    """A weight in panels, and the C struct that describes it. Owns its memory, and keeps the thread pool alive."""

    def __init__(
        self, ops: Kernels, arithmetic: int, shape: torch.Size, bias: Tensor | None, panels: Tensor | None = None
    ) -> None:
        """`panels`: filled before, to be described; None: they are made, to be filled."""
        self.library, self.pool, self._ops = ops.library, ops.pool, ops
        self.n, self.k = shape
        self.order: Tensor | None = None  # of the columns, where it is not the activations'
        self.precise, self.unit = False, 1.0  # of low-bit ones: see `Codes`
        self.arithmetic = arithmetic
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
        num_bytes = self.library.linear_bytes(arithmetic, self.n, self.k)
        if panels is None:
            with ops.packing:
                panels = ops.arena.pages(num_bytes)
        assert panels.nbytes == num_bytes
        self.panels = panels
        self._struct = ctypes.create_string_buffer(self.library.linear_struct_bytes())
        self.pointer = ctypes.addressof(self._struct)

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes

    def describe(self, *, precise: bool, order: Tensor | None, unit: float) -> PackedWeight:
        """Panels that are filled already."""
        self.precise, self.order, self.unit = precise, order, unit
        self.library.linear_describe(
            self.pointer,
            self.arithmetic,
            precise,
            self.panels.data_ptr(),
            pointer(self.bias),
            pointer(order),
            self.n,
            self.k,
            unit,
        )
        return self

    def fill(self, weight: Tensor) -> PackedWeight:
        source = weight.float().contiguous()
        with self._ops.packing:
            self.library.linear_pack(*self._place(), source.data_ptr(), pointer(self.bias), self.n, self.k)
        return self

    def fill_codes(self, weight: _Codes, *, precise: bool) -> PackedWeight:
        # A power of two, so that the division is exact: it moves the scales to where half precision is dense.
        largest = max(float(each.abs().max()) for each in (weight.scales, weight.minimums) if each is not None)
        unit = 2.0 ** math.ceil(math.log2(largest)) / _LARGEST_HALF if largest > 0 else 1.0
        self.precise, self.unit = precise, unit
        values, scales, minimums = (
            weight.values.contiguous(),
            _halves(weight.scales, unit),
            None if weight.minimums is None else _halves(weight.minimums, unit),
        )
        self.order = None if weight.order is None else weight.order.to(torch.int32)
        return self._fill_codes(values, scales, minimums)

    def fill_mxfp4(self, weight: Mxfp4Weight, *, precise: bool) -> PackedWeight:
        self.precise, self.unit = precise, 0.5  # codes are looked up as numbers twice as large
        return self._fill_codes(weight.codes().contiguous(), weight.scales.contiguous())

    def _fill_codes(self, values: Tensor, scales: Tensor, minimums: Tensor | None = None) -> PackedWeight:
        pointers = (pointer(each) for each in (values, scales, minimums, self.order))
        codes = Codes(*pointers, scales.shape[1], self.unit, self.precise)
        with self._ops.packing:
            self.library.linear_pack_codes(*self._place(), codes, pointer(self.bias), self.n, self.k)
        return self

    def _place(self) -> tuple[int, int, int, int]:
        return self.pool, self.pointer, self.arithmetic, self.panels.data_ptr()


@dataclass(frozen=True)
class _Codes:
    """value * scale + minimum, or (value - middle) * scale: what every format of integers comes to."""

    bits: int
    values: Tensor  # [out, in] uint8
    scales: Tensor  # [out, groups] float32
    minimums: Tensor | None = None  # [out, groups] float32; None: values count from the middle
    order: Tensor | None = None

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def is_fine(self) -> bool:
        return self.scales.shape[1] > 1 and self.group_size % GROUP != 0

    def as_fine(self) -> _Codes:
        """Codes as those of small groups are stored: in 8 bits, with minimums."""
        minimums = self.minimums if self.minimums is not None else -self.scales * (1 << (self.bits - 1))
        return replace(self, bits=8, minimums=minimums)


def packed_low_bit(
    ops: Kernels, weight: object, bias: Tensor | None, bits: frozenset[int], *, precise: bool = True
) -> PackedWeight | None:
    """The weight in the integers that it has, if there are kernels for them and their bits are to be kept. Rows that
    meet it have two digits for every value, or if it is not `precise` for the largest."""
    if isinstance(weight, Mxfp4Weight):
        if 4 not in bits:
            return None
        return PackedWeight(ops, LOW_BIT_MXFP4, weight.shape, bias).fill_mxfp4(weight, precise=precise)
    codes = _codes(weight)
    if codes is not None and codes.is_fine:
        codes = codes.as_fine() if codes.group_size % (GROUP // 2) == 0 else None
    if codes is None or codes.bits not in bits:
        return None
    arithmetics = LOW_BIT_CENTRED if codes.minimums is None else LOW_BIT
    arithmetic = LOW_BIT_FINE if codes.is_fine else arithmetics[codes.bits]
    return PackedWeight(ops, arithmetic, codes.values.shape, bias).fill_codes(codes, precise=precise)


def _codes(weight: object) -> _Codes | None:
    if isinstance(weight, Int8Weight):
        return _Codes(8, weight.values.view(torch.uint8) ^ 128, weight.scales.float()[:, None])
    if not isinstance(weight, GroupedWeight):
        return None
    scales, minimums = weight.scales.float(), None
    if weight.minimums is not None:
        minimums = weight.minimums.float()
    elif weight.zeros is not None:
        minimums = -scales * weight.zeros.float()
    return _Codes(weight.bits, weight.integers(), scales, minimums, weight.order)


def _halves(values: Tensor, unit: float) -> Tensor:
    return (values / unit).half().contiguous()


class NativeLinear:
    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight
        self._run, self._pool, self._pointer, self._n = weight.library.linear_run, weight.pool, weight.pointer, weight.n
        self._source = Source()

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        m = x.shape[0]
        y = x.new_empty(m, self._n)
        self._source.x = x.data_ptr()
        self._run(self._pool, self._pointer, self._source, y.data_ptr(), m)
        return y


class NativeHeads:
    """A weight for each head, one product after the other: a row's result does not depend on those beside it."""

    def __init__(self, linears: list[NativeLinear]) -> None:
        self._linears = linears

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([linear(x[:, head]) for head, linear in enumerate(self._linears)], dim=1)


class NativeLookup:
    """The embedding, read from the panels of the head that it is tied to."""

    def __init__(self, weight: PackedWeight) -> None:
        assert weight.order is None, "rows are read as they are stored"
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._weight
        ids = x.to(torch.int32).contiguous()
        out = torch.empty(ids.shape[0], weight.k)
        weight.library.linear_lookup(weight.pool, weight.pointer, ids.data_ptr(), out.data_ptr(), ids.shape[0])
        return out
