"""LoRA's two products, y += B(A(x)), each row with the pair of its own slot: BGMV for rows that each have their own
adapter, SGMV for long runs of one. Fifty adapters of rank 16 add 1.6 to 1.7 ms to a step of 8B, where reading them
takes 0.95 (docs/benchmarks.md, Adapters). In prefill arithmetic is the limit, and was not measured.

Where its matrices lie is read on the device, so a captured graph serves any mix of adapters. A row without one, or
whose adapter leaves the linear alone, is passed over; of ranks only those that are there are read. First A makes of x a
few numbers per row (`shrink`), then B makes outputs of them (`expand`). What A makes is cut along its inputs, so that
all processors read, and summed by B's programs in one order: results do not vary.

A linear may join several projections. Each has a pair of its own: a part.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.hub.peft import MAX_RANK
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous
from penstock.model.ops.triton.common.tiling import Tiling

MAX_PARTS = 3
UNIT = 16  # numbers: where a matrix begins in a slot is told in these
_FEW_RANKS = 16  # at a time

_RANKS = tl.constexpr(MAX_RANK)
_UNIT = tl.constexpr(UNIT)
_NO_SLOT = tl.constexpr(1 << 30)


@dataclass(frozen=True)
class Pairs:
    """Pairs of matrices in the slots for one linear. A is [rank, in], B [rank, out] and scaled."""

    values: Tensor  # of all slots and all linears
    # [slots + 1, parts of all linears, 4] int32: where A begins, where B, the rank. The last is of rows without a slot.
    table: Tensor
    first: int  # of the parts
    inputs: int
    outputs: tuple[int, ...]  # of each part, side by side


class Tilings(NamedTuple):
    shrink: Tiling  # outputs are ranks
    expand: Tiling  # columns are ranks


def few_tilings(num_rows: int) -> Tilings:
    """Tilings of rows that each read a pair of their own. With few rows, smaller pieces: each processor is to have
    some."""
    inputs, outputs, warps = (512, 256, 1) if num_rows <= 8 else (1024, 512, 2)
    shrink = Tiling(block_n=_FEW_RANKS, block_k=inputs, num_warps=4)
    return Tilings(shrink, Tiling(block_n=outputs, block_k=_FEW_RANKS, num_warps=warps))


def many_tilings(dtype: torch.dtype) -> Tilings:
    """Tilings of rows that come in long runs of one slot."""
    if dtype is torch.float32:
        shrink = Tiling(block_m=32, block_n=16, block_k=32, num_warps=4, num_stages=1)
        return Tilings(shrink, Tiling(block_m=32, block_n=64, block_k=16, num_warps=4, num_stages=3))
    shrink = Tiling(block_m=64, block_n=32, block_k=128, num_warps=4, num_stages=3)
    return Tilings(shrink, Tiling(block_m=64, block_n=128, block_k=32, num_warps=4, num_stages=3))


def entries_of(table: Tensor, slots: Tensor) -> Tensor:
    """The table's entry of each row [rows]: looked up once for all linears, so that none has to ask where to look."""
    return table[slots]  # -1 is the last one


def add_few(x: Tensor, y: Tensor, entries: Tensor, pairs: Pairs, tilings: Tilings | None = None) -> None:
    """y [rows, out] += what the pairs of the rows' entries make of x [rows, in]: each row by itself."""
    shrink, expand = tilings or few_tilings(x.shape[0])
    expand_few(shrink_few(x, entries, pairs, shrink), y, entries, pairs, expand)


def shrink_few(x: Tensor, entries: Tensor, pairs: Pairs, tiling: Tiling) -> Tensor:
    """A's products with x, in pieces yet to be summed: [rows, pieces, parts, ranks]"""
    rows, parts, pieces = x.shape[0], len(pairs.outputs), triton.cdiv(pairs.inputs, tiling.block_k)
    hidden = torch.empty(rows, pieces, parts, MAX_RANK, device=x.device)
    _shrink_few_kernel[(pieces, rows, parts)](
        x,
        entries,
        pairs.values,
        hidden,
        entries.stride(0),
        pairs.first,
        pairs.inputs,
        BLOCK_R=tiling.block_n,
        BLOCK_K=tiling.block_k,
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        launch_pdl=has_pdl(),
    )
    return hidden


def expand_few(hidden: Tensor, y: Tensor, entries: Tensor, pairs: Pairs, tiling: Tiling) -> None:
    rows, pieces, parts, _ = hidden.shape
    _expand_few_kernel[(_column_tiles(pairs.outputs, tiling.block_n), rows)](
        hidden,
        entries,
        pairs.values,
        y,
        entries.stride(0),
        pairs.first,
        pieces,
        **_sizes(pairs.outputs),
        PARTS=parts,
        BLOCK_R=tiling.block_k,
        BLOCK_N=tiling.block_n,
        BLOCK_S=triton.next_power_of_2(pieces),
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        launch_pdl=has_pdl(),
    )


def add_many(x: Tensor, y: Tensor, slots: Tensor, pairs: Pairs, tilings: Tilings | None = None) -> None:
    """The same for rows that come in runs: those of a tile that have one slot go together."""
    shrink, expand = tilings or many_tilings(x.dtype)
    rows, parts = x.shape[0], len(pairs.outputs)
    tiles, precision = triton.cdiv(rows, shrink.block_m), "ieee" if x.dtype is torch.float32 else "tf32"
    steps, pieces = _in_pieces(pairs.inputs, shrink.block_k, tiles * parts)
    hidden = torch.empty(rows, pieces, parts, MAX_RANK, device=x.device)
    _shrink_many_kernel[(tiles, parts, pieces)](
        x,
        slots,
        pairs.table,
        pairs.values,
        hidden,
        pairs.table.stride(0),
        pairs.first,
        rows,
        pairs.inputs,
        steps,
        BLOCK_M=shrink.block_m,
        BLOCK_R=shrink.block_n,
        BLOCK_K=shrink.block_k,
        PRECISION=precision,
        num_warps=shrink.num_warps,
        num_stages=shrink.num_stages,
    )
    _expand_many_kernel[(_column_tiles(pairs.outputs, expand.block_n), tiles)](
        hidden,
        slots,
        pairs.table,
        pairs.values,
        y,
        pairs.table.stride(0),
        pairs.first,
        rows,
        pieces,
        **_sizes(pairs.outputs),
        PARTS=parts,
        BLOCK_M=expand.block_m,
        BLOCK_R=expand.block_k,
        BLOCK_N=expand.block_n,
        PRECISION=precision,
        num_warps=expand.num_warps,
        num_stages=expand.num_stages,
    )


_WANTED_PROGRAMS = 256  # about two for each processor of a large GPU


def _in_pieces(inputs: int, step: int, programs: int) -> tuple[int, int]:
    """Steps that one program sums, and how many share a sum: one, unless there would be too few programs."""
    steps = -(-inputs // step)
    per_piece = -(-steps // min(max(_WANTED_PROGRAMS // programs, 1), steps))
    return per_piece, -(-steps // per_piece)


def _column_tiles(outputs: tuple[int, ...], tile: int) -> int:
    return sum(triton.cdiv(size, tile) for size in outputs)


def _sizes(outputs: tuple[int, ...]) -> dict[str, int]:
    first, second, third = (*outputs, 0, 0)[:MAX_PARTS]
    return {"SIZE_0": first, "SIZE_1": second, "SIZE_2": third}


@triton.jit
def _pair(entry, values_ptr):
    """Its rank, A and B."""
    a = tl.load(entry).to(tl.int64) * _UNIT
    b = tl.load(entry + 1).to(tl.int64) * _UNIT
    return tl.load(entry + 2), values_ptr + a, values_ptr + b


@triton.jit
def _columns_of(tile, SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of outputs: its part, that part's size and first column, and the tile's first column within it."""
    FIRST: tl.constexpr = (SIZE_0 + BLOCK_N - 1) // BLOCK_N
    SECOND: tl.constexpr = FIRST + (SIZE_1 + BLOCK_N - 1) // BLOCK_N
    part = (tile >= FIRST).to(tl.int32) + (tile >= SECOND).to(tl.int32)
    size = tl.where(part == 0, SIZE_0, tl.where(part == 1, SIZE_1, SIZE_2))
    start = tl.where(part == 0, 0, tl.where(part == 1, SIZE_0, SIZE_0 + SIZE_1))
    column = (tile - tl.where(part == 0, 0, tl.where(part == 1, FIRST, SECOND))) * BLOCK_N
    return part, size, start, column


@triton.jit(do_not_specialize=["stride", "first"])
def _shrink_few_kernel(
    x_ptr,
    entries_ptr,
    values_ptr,
    hidden_ptr,
    stride,
    first,
    inputs,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    piece = tl.program_id(0)
    row = tl.program_id(1)
    part = tl.program_id(2)
    rank, a, _ = _pair(entries_ptr + row * stride + (first + part) * 4, values_ptr)
    if rank == 0:
        wait_for_previous(PDL)
        return
    r = tl.arange(0, BLOCK_R)
    k = piece * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < inputs
    at = a + r[:, None] * inputs + k[None, :]
    weight = tl.load(at, mask=(r < rank)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * inputs + k, mask=inside, other=0.0).to(tl.float32)
    hidden = hidden_ptr + ((row * tl.num_programs(0) + piece) * tl.num_programs(2) + part) * _RANKS
    for done in tl.range(0, rank, BLOCK_R):
        tl.store(hidden + done + r, tl.sum(weight.to(tl.float32) * x[None, :], axis=1), mask=done + r < rank)
        at += BLOCK_R * inputs
        is_rank = done + BLOCK_R + r < rank
        weight = tl.load(at, mask=is_rank[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["stride", "first", "pieces"])
def _expand_few_kernel(
    hidden_ptr,
    entries_ptr,
    values_ptr,
    y_ptr,
    stride,
    first,
    pieces,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row = tl.program_id(1)
    part, size, start, column = _columns_of(tl.program_id(0), SIZE_0, SIZE_1, SIZE_2, BLOCK_N)
    rank, _, b = _pair(entries_ptr + row * stride + (first + part) * 4, values_ptr)
    if rank == 0:
        wait_for_previous(PDL)
        return
    r = tl.arange(0, BLOCK_R)
    s = tl.arange(0, BLOCK_S)
    n = column + tl.arange(0, BLOCK_N)
    inside = n < size
    at = b + r[:, None] * size + n[None, :]
    weight = tl.load(at, mask=(r < rank)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    hidden = hidden_ptr + (row * pieces * PARTS + part) * _RANKS
    y = y_ptr + row.to(tl.int64) * (SIZE_0 + SIZE_1 + SIZE_2) + start + n
    total = tl.load(y, mask=inside, other=0.0).to(tl.float32)
    for done in tl.range(0, rank, BLOCK_R):
        is_there = (done + r < rank)[:, None] & (s < pieces)[None, :]
        some = tl.load(hidden + (done + r)[:, None] + s[None, :] * (PARTS * _RANKS), mask=is_there, other=0.0)
        total += tl.sum(weight.to(tl.float32) * tl.sum(some, axis=1)[:, None], axis=0)
        at += BLOCK_R * size
        is_rank = done + BLOCK_R + r < rank
        weight = tl.load(at, mask=is_rank[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _slot_after(slots, slot):
    """The next larger one of a tile's rows."""
    return tl.min(tl.where(slots > slot, slots, _NO_SLOT), axis=0)


@triton.jit(do_not_specialize=["stride", "first", "num_rows", "steps"], do_not_specialize_on_alignment=["slots_ptr"])
def _shrink_many_kernel(
    x_ptr,
    slots_ptr,
    table_ptr,
    values_ptr,
    hidden_ptr,
    stride,
    first,
    num_rows,
    inputs,
    steps,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    part = tl.program_id(1)
    piece = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    begin = piece * steps * BLOCK_K
    x = x_ptr + m.to(tl.int64)[:, None] * inputs
    hidden = hidden_ptr + ((m.to(tl.int64) * tl.num_programs(2) + piece) * tl.num_programs(1) + part)[:, None] * _RANKS
    slots = tl.load(slots_ptr + m, mask=m < num_rows, other=-1)
    slot = _slot_after(slots, -1)
    while slot < _NO_SLOT:
        rank, a, _ = _pair(table_ptr + slot * stride + (first + part) * 4, values_ptr)
        is_mine = (slots == slot)[:, None]
        for done in tl.range(0, rank, BLOCK_R):
            is_rank = done + r < rank
            weights = a + (done + r)[:, None] * inputs
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for step in tl.range(0, steps):
                k = begin + step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
                rows = tl.load(x + k, mask=is_mine & (k < inputs), other=0.0)
                weight = tl.load(weights + k, mask=is_rank[:, None] & (k < inputs), other=0.0)
                acc = tl.dot(rows, weight.T, acc, input_precision=PRECISION)
            tl.store(hidden + (done + r)[None, :], acc, mask=is_mine & is_rank[None, :])
        slot = _slot_after(slots, slot)


@triton.jit(do_not_specialize=["stride", "first", "num_rows", "pieces"], do_not_specialize_on_alignment=["slots_ptr"])
def _expand_many_kernel(
    hidden_ptr,
    slots_ptr,
    table_ptr,
    values_ptr,
    y_ptr,
    stride,
    first,
    num_rows,
    pieces,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    part, size, start, column = _columns_of(tl.program_id(0), SIZE_0, SIZE_1, SIZE_2, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    n = (column + tl.arange(0, BLOCK_N))[None, :]
    hidden = hidden_ptr + (m.to(tl.int64) * pieces * PARTS + part)[:, None] * _RANKS
    y = y_ptr + m.to(tl.int64)[:, None] * (SIZE_0 + SIZE_1 + SIZE_2) + start + n
    slots = tl.load(slots_ptr + m, mask=m < num_rows, other=-1)
    slot = _slot_after(slots, -1)
    while slot < _NO_SLOT:
        rank, _, b = _pair(table_ptr + slot * stride + (first + part) * 4, values_ptr)
        is_mine = (slots == slot)[:, None]
        if rank > 0:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for done in tl.range(0, rank, BLOCK_R):
                is_rank = done + r < rank
                sums = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                for piece in tl.range(pieces):
                    at = hidden + piece * (PARTS * _RANKS) + (done + r)[None, :]
                    sums += tl.load(at, mask=is_mine & is_rank[None, :], other=0.0)
                weight = tl.load(b + (done + r)[:, None] * size + n, mask=is_rank[:, None] & (n < size), other=0.0)
                acc = tl.dot(sums.to(weight.dtype), weight, acc, input_precision=PRECISION)
            mask = is_mine & (n < size)
            acc += tl.load(y, mask=mask, other=0.0).to(tl.float32)
            tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=mask)
        slot = _slot_after(slots, slot)
