"""A layer's experts in C: one call runs all that were chosen. Knows pointers; what is computed is in `kernels/`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.core.model_config import Activation, ClampedSwiGLU
from penstock.model.ops import ExpertWeights
from penstock.model.ops import library as c
from penstock.model.ops.panels import PackedWeight

Pair = tuple[PackedWeight, PackedWeight]  # gate_up and down


class NativeExperts:
    def __init__(
        self, count: int, pairs: list[Pair], pack: Callable[[ExpertWeights], Pair], activation: Activation = "silu"
    ) -> None:
        """`count`: of slots, of which the last may have nobody yet; `pack`: what is put there later."""
        self._pack = pack
        self._pairs = [*pairs, *pairs[:1] * (count - len(pairs))]  # kept: C has their addresses
        self._pointers = (ctypes.c_void_p * (2 * count))(*(each.pointer for pair in self._pairs for each in pair))
        self._struct = c.Experts(ctypes.addressof(self._pointers), count=count, hidden=pairs[0][0].k)
        if isinstance(activation, ClampedSwiGLU):
            self._struct.alpha, self._struct.limit = activation.alpha, activation.limit
        self._library, self._pool = pairs[0][0].library, pairs[0][0].pool

    def put(self, slot: int, expert: ExpertWeights) -> None:
        """See `ExpertLinears.put`."""
        self._pairs[slot] = pair = self._pack(expert)
        self._pointers[2 * slot], self._pointers[2 * slot + 1] = (each.pointer for each in pair)

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
