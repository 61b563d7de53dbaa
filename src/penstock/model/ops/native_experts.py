"""A layer's experts in C: one call runs all that were chosen. Knows pointers; what is computed is in `kernels/`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from penstock.model.ops import library as c
from penstock.model.ops.panels import PackedWeight


class NativeExperts:
    def __init__(self, pairs: list[tuple[PackedWeight, PackedWeight]]) -> None:
        self._pairs = pairs  # kept: C has their addresses
        self._pointers = (ctypes.c_void_p * (2 * len(pairs)))(*(each.pointer for pair in pairs for each in pair))
        self._struct = c.Experts(ctypes.addressof(self._pointers), count=len(pairs), hidden=pairs[0][0].k)
        self._library, self._pool = pairs[0][0].library, pairs[0][0].pool

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat, struct = ids.flatten(), self._struct
        order = flat.argsort(stable=True)
        # Those who are elsewhere (-1) come first, and what is before the first start is passed over.
        starts = (flat + 1).bincount(minlength=struct.count + 1).cumsum(0).to(torch.int32)
        rows = (order // ids.shape[1]).to(torch.int32)
        shares = weights.flatten()[order]
        struct.starts, struct.rows, struct.weights = starts.data_ptr(), rows.data_ptr(), shares.data_ptr()
        out = torch.zeros_like(x)
        self._library.experts_run(self._pool, struct, x.data_ptr(), out.data_ptr())
        return out
