"""Adapters in C: all that are in a step, at one site, in one call. Knows pointers, and who must outlive them.

Host memory is the device's: an adapter is packed once, when it is read, and a slot is a pointer to it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.lora_slots import HostPairs, Part, packed
from penstock.model.ops import Linear
from penstock.model.ops import library as c
from penstock.model.ops.library import ARITHMETICS
from penstock.model.ops.native import NativeOps
from penstock.model.ops.panels import NativeLinear


class PackedAdapter:
    """An adapter as C sees it: an array of pairs by site, and all that it points to."""

    def __init__(self, ops: NativeOps, pairs: HostPairs, num_sites: int) -> None:
        self.structs = (c.AdapterPair * num_sites)()
        self._kept: list[Any] = []
        for site, host in pairs.items():
            pair = packed(ops, host)
            parts = (c.AdapterPart * len(pair.parts))(*map(_part, pair.parts))
            self.structs[site] = c.AdapterPair(_pointer(pair.a), ctypes.cast(parts, ctypes.c_void_p), len(parts))
            self._kept += (pair, parts)


class NativeSlots:
    def __init__(self, ops: NativeOps, num_slots: int, num_sites: int) -> None:
        self._ops = ops
        self._num_sites = num_sites
        # The threads of the operations serve one caller, and that is the step.
        self._packer = NativeOps(list(ARITHMETICS)[ops.arithmetic], threads=1)
        self._nothing = PackedAdapter(self._packer, {}, num_sites)
        self._slots = [self._nothing] * num_slots
        self._groups: ctypes.Array[c.AdapterRows] = (c.AdapterRows * 0)()
        self._rows: list[Tensor] = []  # kept: the structs point to them

    def prepared(self, pairs: HostPairs) -> PackedAdapter:
        return PackedAdapter(self._packer, pairs, self._num_sites)

    def place(self, slot: int, adapter: PackedAdapter) -> None:
        self._slots[slot] = adapter

    def clear(self, slot: int) -> None:
        self._slots[slot] = self._nothing

    def begin(self, batch: Batch) -> None:
        groups = batch.adapters
        self._rows = [group.rows.to(torch.int32) for group in groups]
        self._groups = (c.AdapterRows * len(groups))(
            *(
                c.AdapterRows(ctypes.addressof(self._slots[group.slot].structs), rows.data_ptr(), len(rows))
                for group, rows in zip(groups, self._rows, strict=True)
            )
        )

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        x = x.contiguous()
        assert y.is_contiguous()
        ops, groups = self._ops, self._groups
        ops.library.adapters_run(
            ops.pool, groups, len(groups), site, x.data_ptr(), x.shape[1], y.data_ptr(), y.shape[1]
        )


def _part(part: Part) -> c.AdapterPart:
    return c.AdapterPart(_pointer(part.b), part.ranks.start, part.columns.start)


def _pointer(linear: Linear) -> int:
    assert isinstance(linear, NativeLinear)
    return linear.weight.pointer
