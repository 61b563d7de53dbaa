"""Routing of a mixture, for any number of tokens and experts: the router's top k, rows sorted by their experts, the sum
of what those made. With few tokens the start of a kernel is the limit, with many memory's bandwidth; neither was
measured by itself.

A pair is a token and one of its experts; pairs are counted token by token. A block is what a program multiplies at a
time: rows of one expert. The host never learns who was chosen, so all that it fixes is how many blocks there may be.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.ops.experts import ExpertMap, placed
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous

FEW = 16  # tokens: as many as every block has rows for
_SUMMED = 1024  # columns that one program sums up
_SCANNED = 4096  # pairs that a program looks at together


def topk(
    logits: Tensor, per_token: int, *, normalized: bool, experts: ExpertMap | None = None, batch: Batch | None = None
) -> tuple[Tensor, Tensor]:
    """Each row's best experts, best first, and their shares: [rows, per_token] int32 and float32. `experts`: they are
    counted there, and looked up; see `Ops.route`."""
    rows, count = logits.shape
    ids = torch.empty(rows, per_token, dtype=torch.int32, device=logits.device)
    shares = torch.empty(rows, per_token, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(count)
    counts, places = (None, None) if experts is None else (experts.counts, experts.places)
    # A captured step of single tokens is padded with sequences of no context.
    contexts = batch.context_lens if batch is not None and batch.num_sequences == rows else None
    _topk_kernel[(rows,)](
        logits,
        ids,
        shares,
        counts,
        places,
        batch.token_ids if batch is not None else None,
        batch.positions if batch is not None else None,
        contexts,
        COUNT=count,
        PER_TOKEN=per_token,
        TOP=triton.next_power_of_2(per_token),
        NORMALIZED=normalized,
        COUNTED=counts is not None,
        COPIES=1 if counts is None else counts.shape[1],
        PLACED=places is not None,
        PADDED=contexts is not None,
        BLOCK=block,
        PDL=has_pdl(),
        num_warps=1 if block <= 256 else 4,
        launch_pdl=has_pdl(),
    )
    return ids, shares


def chosen(choice: tuple[Tensor, Tensor], experts: ExpertMap | None, batch: Batch | None) -> tuple[Tensor, Tensor]:
    """Experts that torch has chosen, as kernels take them; counted and looked up as by `topk`."""
    ids, shares = choice
    if experts is not None:
        ids, shares = placed(ids, shares, experts, batch, _counted(len(ids), batch))
    return ids.to(torch.int32).contiguous(), shares.float().contiguous()


def _counted(rows: int, batch: Batch | None) -> Tensor | None:
    """Rows of a captured step of single tokens that are not padding, which has no context."""
    return batch.context_lens > 0 if batch is not None and batch.num_sequences == rows else None


@triton.jit
def _topk_kernel(
    logits_ptr,
    ids_ptr,
    shares_ptr,
    counts_ptr,
    places_ptr,
    tokens_ptr,
    positions_ptr,
    contexts_ptr,
    COUNT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    TOP: tl.constexpr,
    NORMALIZED: tl.constexpr,
    COUNTED: tl.constexpr,
    COPIES: tl.constexpr,
    PLACED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row = tl.program_id(0)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, TOP)
    wait_for_previous(PDL)
    left = tl.load(logits_ptr + row * COUNT + expert, mask=expert < COUNT, other=float("-inf")).to(tl.float32)
    largest = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - largest), axis=0)
    values, chosen = tl.full([TOP], float("-inf"), tl.float32), tl.zeros([TOP], tl.int32)
    for i in tl.static_range(PER_TOKEN):
        # Not by its value alone: of equal ones the first, and of nothing but NaN any that is there.
        best, at = tl.max(left, axis=0, return_indices=True)
        at = tl.minimum(at, COUNT - 1)
        values, chosen = tl.where(place == i, best, values), tl.where(place == i, at, chosen)
        left = tl.where(expert == at, float("-inf"), left)
    shares = tl.exp(values - largest)
    shares = shares / (tl.sum(shares, axis=0) if NORMALIZED else total)
    inside = place < PER_TOKEN
    cell = chosen * COPIES
    if PLACED:
        line = places_ptr + chosen * (1 + COPIES)
        turn = tl.load(tokens_ptr + row).to(tl.int64) + tl.load(positions_ptr + row)
        copy = (turn % tl.load(line)).to(tl.int32)
        cell += copy
        chosen = tl.load(line + 1 + copy)
        shares = tl.where(chosen >= 0, shares, 0.0)
    if COUNTED:
        is_there = inside
        if PADDED:
            is_there = inside & (tl.load(contexts_ptr + row) > 0)
        tl.atomic_add(counts_ptr + cell, tl.full([TOP], 1, tl.int64), mask=is_there, sem="relaxed")
    tl.store(ids_ptr + row * PER_TOKEN + place, chosen, mask=inside)
    tl.store(shares_ptr + row * PER_TOKEN + place, shares, mask=inside)


@dataclass(frozen=True)
class Blocks:
    """Which rows a program multiplies with which expert."""

    ids: Tensor  # [tokens, per_token]
    rows: int  # that a block has room for
    count: int  # of blocks; some are of no use
    table: Tensor | None  # [count, 3] int32: expert, and where in `order` its rows begin and end
    order: Tensor | None  # [pairs] int32: pairs by their experts
    ends: Tensor | None  # [experts] int32: where in `order` each expert's end

    @property
    def pairs(self) -> int:
        return self.ids.numel()


def blocks_of(ids: Tensor, num_experts: int, rows: int) -> Blocks:
    """If every block has room for all tokens nothing need be sorted: a pair's block is that of all who chose as it did,
    unless one before it did so too."""
    tokens, pairs = ids.shape[0], ids.numel()
    if tokens <= min(rows, FEW):
        return Blocks(ids, rows, pairs, None, None, None)
    count = pairs // rows + num_experts
    table = torch.empty(count, 3, dtype=torch.int32, device=ids.device)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    scanned = min(triton.next_power_of_2(pairs), _SCANNED)
    _sort_by_expert_kernel[(num_experts,)](
        ids,
        table,
        order,
        ends,
        pairs,
        ROWS=rows,
        SCANNED=scanned,
        PDL=has_pdl(),
        num_warps=min(max(scanned // 256, 1), 8),
        launch_pdl=has_pdl(),
    )
    return Blocks(ids, rows, count, table, order, ends)


@triton.jit(do_not_specialize=["pairs"])
def _sort_by_expert_kernel(
    ids_ptr, table_ptr, order_ptr, ends_ptr, pairs, ROWS: tl.constexpr, SCANNED: tl.constexpr, PDL: tl.constexpr
):
    """Each expert finds its own pairs, and how many go before: it needs nobody's counts. By those before it has a run
    of blocks to itself, of at least as many as its rows fill; the rest of them are of no use. Pairs of experts that are
    elsewhere (-1) go before all: the blocks that they would fill are the first expert's, and empty."""
    launch_dependents(PDL)
    expert = tl.program_id(0)
    place = tl.arange(0, SCANNED)
    begin, size = 0, 0
    wait_for_previous(PDL)
    for start in range(0, pairs, SCANNED):
        ids = tl.load(ids_ptr + start + place, mask=start + place < pairs, other=1 << 30)
        begin += tl.sum((ids < expert).to(tl.int32), axis=0)
        size += tl.sum((ids == expert).to(tl.int32), axis=0)
    end = begin + size
    tl.store(ends_ptr + expert, end)
    first, behind = begin // ROWS + expert, end // ROWS + expert + 1
    some = tl.arange(0, 128)
    if expert == 0:
        for start in range(0, first, 128):
            line = table_ptr + (start + some) * 3
            for place_in_line in tl.static_range(3):  # an expert, and rows from 0 to 0
                tl.store(line + place_in_line, tl.zeros_like(some), mask=start + some < first)
    for start in range(0, pairs // ROWS + 1, 128):
        block = first + start + some
        rows_begin = tl.minimum(begin + (block - first) * ROWS, end)
        line = table_ptr + block * 3
        tl.store(line, expert + tl.zeros_like(block), mask=block < behind)
        tl.store(line + 1, rows_begin, mask=block < behind)
        tl.store(line + 2, tl.minimum(rows_begin + ROWS, end), mask=block < behind)
    for start in range(0, pairs, SCANNED):
        ids = tl.load(ids_ptr + start + place, mask=start + place < pairs, other=1 << 30)
        is_mine = (ids == expert).to(tl.int32)
        tl.store(order_ptr + begin + tl.cumsum(is_mine, axis=0) - 1, start + place, mask=is_mine > 0)
        begin += tl.sum(is_mine, axis=0)


@triton.jit
def rows_of_block(
    ids_ptr,
    table_ptr,
    order_ptr,
    block,
    tokens,
    PER_TOKEN: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    SORTED: tl.constexpr,
):
    """A block's expert, its pairs, which of them are there, and whether it is of any use."""
    row = tl.arange(0, ROWS)
    if SORTED:
        line = table_ptr + block * 3
        expert, begin, end = tl.load(line), tl.load(line + 1), tl.load(line + 2)
        is_row = begin + row < end
        pair = tl.load(order_ptr + begin + row, mask=is_row, other=0)
        is_used = begin < end
    else:
        place = tl.arange(0, TOP)
        at = row[:, None] * PER_TOKEN + place[None, :]
        ids = tl.load(ids_ptr + at, mask=(row < tokens)[:, None] & (place < PER_TOKEN)[None, :], other=-1)
        expert = tl.load(ids_ptr + block)
        is_mine = ids == expert
        pair = tl.max(tl.where(is_mine, at, 0), axis=1)  # not a sum: NaN logits may name one twice
        is_row = tl.sum(is_mine.to(tl.int32), axis=1) > 0
        least = tl.min(tl.min(tl.where(is_mine, at, 1 << 30), axis=1), axis=0)
        is_used = tl.where(expert >= 0, least, -1) == block
    return expert.to(tl.int64), pair, is_row, is_used


def reordered(x: Tensor, order: Tensor, blocks: Blocks) -> Tensor:
    """A row for every pair, from its token's or its own, with the columns as its expert has them: [pairs, in]."""
    columns = x.shape[1]
    out = x.new_empty(blocks.pairs, columns)
    block = min(triton.next_power_of_2(columns), _SUMMED)
    _reorder_kernel[(blocks.pairs, triton.cdiv(columns, block))](
        x,
        blocks.ids,
        order,
        out,
        COLUMNS=columns,
        SHARING=blocks.pairs // x.shape[0],
        BLOCK=block,
        PDL=has_pdl(),
        num_warps=4,
        launch_pdl=has_pdl(),
    )
    return out


@triton.jit
def _reorder_kernel(
    x_ptr,
    ids_ptr,
    order_ptr,
    out_ptr,
    COLUMNS: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    wait_for_previous(PDL)
    expert = tl.maximum(tl.load(ids_ptr + pair), 0).to(tl.int64)  # of one that is elsewhere nobody reads the row
    source = tl.load(order_ptr + expert * COLUMNS + column, mask=inside, other=0)
    x = tl.load(x_ptr + pair // SHARING * COLUMNS + source, mask=inside, other=0.0)
    tl.store(out_ptr + pair * COLUMNS + column, x, mask=inside)


def combine(made: Tensor, shares: Tensor) -> Tensor:
    """Weighted sum of what each token's experts made: from [pairs, hidden], in the order in which they were chosen."""
    (tokens, per_token), hidden = shares.shape, made.shape[1]
    out = made.new_empty(tokens, hidden)
    block = min(triton.next_power_of_2(hidden), _SUMMED)
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](
        made,
        shares,
        out,
        HIDDEN=hidden,
        PER_TOKEN=per_token,
        BLOCK=block,
        PDL=has_pdl(),
        num_warps=4,
        launch_pdl=has_pdl(),
    )
    return out


@triton.jit
def _combine_kernel(
    made_ptr,
    shares_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    wait_for_previous(PDL)
    for i in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + i
        share = tl.load(shares_ptr + pair)
        # What weighs nothing may be elsewhere: nobody has made it here.
        size = tl.where(share != 0.0, HIDDEN, 0)
        made = tl.load(made_ptr + pair * HIDDEN + column, mask=column < size, other=0.0)
        total += made.to(tl.float32) * share
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=column < HIDDEN)


def add_shared(found: Tensor, made: Tensor, logits: Tensor) -> Tensor:
    """See `Ops.add_shared`."""
    tokens, hidden = found.shape
    out = torch.empty_like(found)
    block = min(triton.next_power_of_2(hidden), _SUMMED)
    _add_shared_kernel[(tokens, triton.cdiv(hidden, block))](
        found, made, logits, out, HIDDEN=hidden, BLOCK=block, PDL=has_pdl(), num_warps=4, launch_pdl=has_pdl()
    )
    return out


@triton.jit
def _add_shared_kernel(
    found_ptr, made_ptr, logits_ptr, out_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = token * HIDDEN + column, column < HIDDEN
    wait_for_previous(PDL)
    share = 1.0 / (1.0 + tl.exp(-tl.load(logits_ptr + token).to(tl.float32)))
    made = tl.load(made_ptr + at, mask=inside, other=0.0).to(tl.float32) * share
    total = tl.load(found_ptr + at, mask=inside, other=0.0).to(tl.float32) + made
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
