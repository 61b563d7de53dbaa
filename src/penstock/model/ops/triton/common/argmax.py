"""Argmax of logits, for greedy sampling of any number of rows: torch's takes one processor per row, and few rows leave
the others idle. Reading logits is the limit, and with few rows the start of two kernels; no figure is recorded
(`python -m tools.gpu_ops small`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous

_PIECE = 8192  # of a row, that one program goes over


def argmax(logits: Tensor) -> Tensor:
    """[rows, vocabulary] -> [rows] int32; of equals, the first."""
    rows, columns = logits.shape
    pieces = triton.cdiv(columns, _PIECE)
    values = logits.new_empty(rows, pieces, dtype=torch.float32)
    ids = logits.new_empty(rows, pieces, dtype=torch.int32)
    best = logits.new_empty(rows, dtype=torch.int32)
    options = {"PDL": has_pdl(), "launch_pdl": has_pdl()}
    _best_of_piece[(rows, pieces)](
        logits, values, ids, logits.stride(0), columns, pieces, PIECE=_PIECE, num_warps=8, **options
    )
    _best_of_row[(rows,)](values, ids, best, columns, pieces, BLOCK=triton.next_power_of_2(pieces), **options)
    return best


@triton.jit
def _first_of_largest(x, ids, columns):
    """The smallest id among the largest; a row of NaN has none, and gets its last."""
    largest = tl.max(x, axis=0)
    return largest, tl.minimum(tl.min(tl.where(x == largest, ids, columns), axis=0), columns - 1)


@triton.jit
def _best_of_piece(logits_ptr, values_ptr, ids_ptr, stride, columns, pieces, PIECE: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    row, piece = tl.program_id(0), tl.program_id(1)
    ids = piece * PIECE + tl.arange(0, PIECE)
    wait_for_previous(PDL)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=ids < columns, other=float("-inf")).to(tl.float32)
    largest, first = _first_of_largest(x, ids, columns)
    tl.store(values_ptr + row * pieces + piece, largest)
    tl.store(ids_ptr + row * pieces + piece, first)


@triton.jit
def _best_of_row(values_ptr, ids_ptr, best_ptr, columns, pieces, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    row = tl.program_id(0)
    piece = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    x = tl.load(values_ptr + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    ids = tl.load(ids_ptr + row * pieces + piece, mask=piece < pieces, other=columns)
    _, first = _first_of_largest(x, ids, columns)
    tl.store(best_ptr + row, first)
