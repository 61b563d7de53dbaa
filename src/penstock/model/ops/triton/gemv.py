"""A matrix times one vector: what every linear is when one stream decodes. Only reading the weights takes time.

cuBLAS reads large matrices at the memory's speed, but splits small ones over the device in two launches; here a
program sums whole rows, and there are enough programs even for the smallest.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tiling(NamedTuple):
    rows: int  # of the matrix, that one program computes
    columns: int  # that it reads at a time
    warps: int


# The fastest on an H200 of the tilings in tools/gpu_ops.py: rows that can be read at once are.
WHOLE_ROWS = Tiling(rows=2, columns=4096, warps=8)
LONG_ROWS = Tiling(rows=8, columns=512, warps=4)


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling | None = None) -> Tensor:
    """x [1, columns] times weight [rows, columns], transposed, as F.linear has it; sums are float32."""
    rows, columns = weight.shape
    tiling = tiling or (WHOLE_ROWS if columns <= WHOLE_ROWS.columns else LONG_ROWS)
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, tiling.rows),)
    _gemv_kernel[grid](
        x, weight, bias, out, rows, COLUMNS=columns, HAS_BIAS=bias is not None, ROW_TILE=tiling.rows,
        COLUMN_TILE=min(tiling.columns, triton.next_power_of_2(columns)), num_warps=tiling.warps,
    )  # fmt: skip
    return out


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    is_row = row < rows
    line = weight_ptr + row.to(tl.int64)[:, None] * COLUMNS
    sums = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
    for start in tl.range(0, COLUMNS, COLUMN_TILE, num_stages=3):
        column = start + tl.arange(0, COLUMN_TILE)
        is_column = column < COLUMNS
        weight = tl.load(
            line + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_ptr + column, mask=is_column, other=0.0)
        sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, total, mask=is_row)
