"""Packing of weights of 4 and 8 bits in groups, and of MXFP4, in the order in which the kernels of W4A16 read them, for
weights of any size. Done once, when a model is loaded: memory's bandwidth is the limit, and was not measured.

A row of a weight is cut into chunks, and a chunk into parts of 32 columns: 4 of 4-bit integers, or 2 of 8-bit. A chunk
is 32 words of 16 bits; word i holds one integer of every part, so that one shift and one mask take neighbours out of
neighbouring words. The words of 16 outputs lie together, in the order in which a warp's threads take them as the left
side of a matrix product: each reads 16 bytes, and has them where the tensor cores want them. The columns of a part are
so ordered that a thread's share of the activations is 16 bytes in a row too. Nothing is rearranged while the model
runs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.quantized.grouped import Bits, GroupedWeight, packed
from penstock.model.quantized.mxfp4 import Mxfp4Weight

SPAN = 32  # words of a chunk, and columns of a part
OUTPUTS = 64  # a weight is filled up to a multiple: no program takes more
COLUMNS = 8  # that a thread reads at once
_ROWS = 4096  # packed at a time: on the way each integer takes some bytes


@dataclass(frozen=True)
class PackedWeight:
    values: Tensor  # [out / 16, chunks, 2, 128] int32: two words each
    # [groups, out, filled up and in the order of `by_tile`]; uint8: exponents of powers of two, of 4 bits that are e2m1
    scales: Tensor
    offsets: Tensor | None  # the same: what a group adds if its integers count from the middle
    bits: Bits
    outputs: int
    columns: int
    bias: Tensor | None = None

    @property
    def group_size(self) -> int:
        return self.columns // int(self.scales.shape[-2])

    @property
    def is_mxfp4(self) -> bool:
        return self.scales.dtype is torch.uint8

    @property
    def fits_gemm(self) -> bool:
        """A chunk must lie within a group, unless scales are powers of two: those weights are multiplied by exactly."""
        return self.is_mxfp4 or self.group_size == self.columns or self.group_size % (SPAN * 16 // self.bits) == 0

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)


def can_pack(weight: GroupedWeight) -> bool:
    """Groups are whole parts, and chunks whole groups or the other way round; unless there is one group alone."""
    columns, group, chunk = weight.shape[1], weight.group_size, SPAN * 16 // weight.bits
    if columns % COLUMNS:
        return False
    return group == columns or group % chunk == 0 or (group % SPAN == 0 and chunk % group == 0)


def pack(weight: GroupedWeight, bias: Tensor | None = None) -> PackedWeight:
    offsets = weight.offsets()
    if offsets is not None:
        # 16 bits where the scales have 16: as exact as those, for a group adds a few steps at most.
        offsets = by_tile(offsets.to(torch.float16 if weight.scales.dtype is torch.float16 else torch.float32))
    rows = torch.split(torch.arange(weight.shape[0], device=weight.values.device), _ROWS)
    values = torch.cat([_words(weight.rows(some).integers(), weight.bits) for some in rows])
    return PackedWeight(values, by_tile(weight.scales), offsets, weight.bits, weight.shape[0], weight.shape[1], bias)


def pack_mxfp4(weight: Mxfp4Weight) -> PackedWeight:
    rows = torch.split(torch.arange(weight.shape[0], device=weight.values.device), _ROWS)
    values = torch.cat([_words(weight.rows(some).codes(), 4) for some in rows])
    return PackedWeight(values, by_tile(weight.scales), None, 4, weight.shape[0], weight.shape[1])


def narrowed(weight: GroupedWeight) -> GroupedWeight:
    """Nearly the same numbers, a few thousandths of a step away.

    Scales that are products of a block's and a group's (GGUF's blocks of 256) become half precision. What a group adds
    is to be small, for it will be half precision too: of integers that count from elsewhere than the middle of their
    bits, as those of 2 bits and of 5 do, each output's are moved there.
    """
    scales = weight.scales.half() if weight.scales.dtype is torch.float32 else weight.scales
    if not scales.isfinite().all():
        return weight
    if weight.minimums is None:
        return replace(weight, scales=scales)
    integers = weight.integers()
    low, high = (found.int() for found in integers.aminmax(dim=1, keepdim=True))
    shift = (1 << (weight.bits - 1)) - (low + high + 1) // 2  # [out, 1]
    moved = integers + (shift % 256).to(torch.uint8)  # bytes count round
    minimums = weight.minimums.float() - shift * scales.float()
    return replace(weight, values=packed(moved) if weight.bits == 4 else moved, scales=scales, minimums=minimums)


def by_tile(per_group: Tensor) -> Tensor:
    """[out, groups] -> [groups, out]: of 16 outputs those lie together that one thread sums up, 0 and 8, 1 and 9, …"""
    outputs, groups = per_group.shape
    filled = per_group.new_zeros(-(-outputs // OUTPUTS) * OUTPUTS, groups)
    filled[:outputs] = per_group
    return filled.view(-1, 2, 8, groups).permute(3, 0, 2, 1).reshape(groups, -1)  # [groups, tile, g, r]


def _words(integers: Tensor, bits: int) -> Tensor:
    parts = 16 // bits
    outputs, columns = integers.shape
    filled = integers.new_zeros(-(-outputs // OUTPUTS) * OUTPUTS, -(-columns // (parts * SPAN)) * parts * SPAN)
    filled[:outputs, :columns] = integers
    by_part = filled.view(filled.shape[0], -1, parts, SPAN).int()  # [out, chunks, parts, columns]
    words = by_part[:, :, 0]
    for part in range(1, parts):
        words = words | (by_part[:, :, part] << (bits * part))
    # A thread (g, t) has of each half of the columns (k) two pairs (h) of neighbours (c), of two outputs (r).
    tiles = words.to(torch.int16).view(-1, 2, 8, words.shape[1], 4, 2, 2, 2)  # [tile, r, g, chunk, t, k, h, c]
    return tiles.permute(0, 3, 5, 2, 4, 6, 1, 7).reshape(tiles.shape[0], words.shape[1], 2, 256).view(torch.int32)


# How tensors are laid out over threads follows from the order of their dimensions: those that are not contiguous are
# taken in turn, first lanes, then warps. So whatever a warp has of its own comes first, or right behind the lanes.


@triton.jit
def tile_of(values, TILES: tl.constexpr, CHUNKS: tl.constexpr):
    """[chunks, tiles, 2, 128, 2], as loaded -> [chunks, outputs, words], as multiplied. Nothing leaves its thread.

    In which order the columns are multiplied is all the same. In this one Triton has a thread's four in a row.
    """
    split = tl.reshape(values, [CHUNKS, TILES, 2, 8, 4, 2, 2, 2])  # chunk, tile, k, g, t, h, r, c
    return tl.reshape(tl.permute(split, [0, 1, 6, 3, 5, 4, 2, 7]), [CHUNKS, 16 * TILES, 32])


@triton.jit
def columns_of(x, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """[8, chunks, rows / 8, columns of a part] -> [chunks, columns in that order, rows], as multiplied"""
    split = tl.reshape(x, [8, CHUNKS, ROWS // 8, 4, 2, 2, 2])  # row, chunk, rows, t, k, h, c
    return tl.reshape(tl.permute(split, [1, 5, 3, 4, 6, 2, 0]), [CHUNKS, 32, ROWS])


@triton.jit
def wide_tile_of(
    pairs, TILES: tl.constexpr, BITS: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr, E2M1: tl.constexpr
):
    """[tiles, 2, 128] -> [outputs, columns of a chunk], in the order of `in_packed_order`: for a warp group."""
    first = tl.join(part_of(pairs, 0, BITS, BFLOAT16, PTX, E2M1), part_of(pairs, 1, BITS, BFLOAT16, PTX, E2M1))
    if BITS == 4:
        second = tl.join(part_of(pairs, 2, BITS, BFLOAT16, PTX, E2M1), part_of(pairs, 3, BITS, BFLOAT16, PTX, E2M1))
        split = tl.reshape(tl.join(first, second), [TILES, 2, 8, 4, 2, 2, 2, 2, 2])  # tile, k, g, t, h, r, c, part
        ordered = tl.permute(split, [0, 5, 2, 8, 7, 1, 4, 3, 6])
    else:
        ordered = tl.permute(tl.reshape(first, [TILES, 2, 8, 4, 2, 2, 2, 2]), [0, 5, 2, 7, 1, 4, 3, 6])
    return tl.reshape(ordered, [16 * TILES, 16 // BITS * 32])


@triton.jit
def halves(x):
    """[8, chunks, rows, parts, columns], by the parts: the first half and the second."""
    parts: tl.constexpr = x.shape[3] // 2
    split = tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], 2, parts, x.shape[4]])
    return tl.split(tl.permute(split, [0, 1, 2, 4, 5, 3]))


def in_packed_order(x: Tensor) -> Tensor:
    """[rows, in], with the columns of every part as the packed weight has them, and filled up to whole parts."""
    if x.shape[1] % SPAN:
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % SPAN))
    pairs = x.view(torch.int32).view(x.shape[0], -1, 4, 4)  # [rows, parts, t, k and h]
    return pairs.transpose(2, 3).contiguous().view(x.dtype).view(x.shape)


@triton.jit
def read_per_output(line):
    """Scale or offset of each chunk's group for each output. line: [chunks, tiles] pointers"""
    t, g, r = tl.arange(0, 4), tl.arange(0, 8), tl.arange(0, 2)
    place = t[:, None, None, None, None] * 0 + g[None, :, None, None, None] * 2 + r[None, None, None, None, :]
    return tl.load(line[None, None, :, :, None] + place)  # [t, g, chunks, tiles, r]


@triton.jit
def per_output(values, ROWS: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    """The same as [chunks, outputs, rows], as what was multiplied."""
    CHUNKS: tl.constexpr = values.shape[2]
    OUTPUTS: tl.constexpr = 16 * values.shape[3]
    wide = values.to(tl.float32)
    if values.dtype == tl.uint8:  # an exponent (e8m0), put where a float has it
        wide = (values.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    by_row = tl.reshape(tl.permute(wide.to(DTYPE), [2, 3, 4, 1, 0]), [CHUNKS, OUTPUTS, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(by_row, [CHUNKS, OUTPUTS, ROWS // 8, 4, 2]), [CHUNKS, OUTPUTS, ROWS])


@triton.jit
def per_column(scales, DTYPE: tl.constexpr):
    """Scales of a chunk's groups, as `read_per_output` has them -> [outputs, columns of the chunk], in the order of
    `wide_tile_of`."""
    GROUPS: tl.constexpr = scales.shape[2]
    OUTPUTS: tl.constexpr = 16 * scales.shape[3]
    return tl.reshape(tl.permute(per_output(scales, 32, DTYPE), [1, 0, 2]), [OUTPUTS, GROUPS * 32])


@triton.jit
def repeated(sums, TILES: tl.constexpr):
    """[chunks, 16, rows] -> [chunks, outputs, rows]"""
    TURN: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[2]
    return tl.reshape(tl.broadcast_to(sums[:, None, :, :], [TURN, TILES, 16, ROWS]), [TURN, 16 * TILES, ROWS])


@triton.constexpr_function
def _instructions(bits, part, bfloat16):
    """Instructions that make two floats of two words: a shift, then a mask that puts an exponent before the integer."""
    mask = "0x000F000F" if bits == 4 else "0x00FF00FF"
    exponent = "0x43004300" if bfloat16 else "0x64006400"
    shift = f"shr.u32 t, $2, {bits * part};" if part else "mov.b32 t, $2;"
    return f"{{ .reg .b32 t; {shift} lop3.b32 t, t, {mask}, {exponent}, 0xEA; mov.b32 {{$0, $1}}, t; }}"


@triton.constexpr_function
def _e2m1_instructions(part, bfloat16):
    """Each number's sign is put where a float has it, and exponent and mantissa where those end and begin: that is the
    number but for a power of two, the difference of what exponents count from, with numbers below the least power
    among those of the float. Which is what it is multiplied by."""
    down, mask, kind, power = (
        (6, "0x01C001C0", "bf16x2", "0x7E807E80") if bfloat16 else (3, "0x0E000E00", "f16x2", "0x74007400")
    )
    shift = f"shl.b32 t, $2, {12 - 4 * part};" if part < 3 else "mov.b32 t, $2;"
    return (
        f"{{ .reg .b32 t, m, p, z; {shift} shr.u32 m, t, {down}; and.b32 m, m, {mask}; "
        f"lop3.b32 t, t, 0x80008000, m, 0xEA; mov.b32 p, {power}; mov.b32 z, 0x80008000; "
        f"fma.rn.{kind} t, t, p, z; mov.b32 {{$0, $1}}, t; }}"
    )


@triton.jit
def _e2m1_of(code):
    """The same in float32, of a number's 4 bits."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.constexpr_function
def zero_of(bits, bfloat16):
    """The middle as `part_of` makes it: the exponent stands for 128 in bfloat16, for 1,024 in float16."""
    return float((128 if bfloat16 else 1024) + (1 << (bits - 1)))


@triton.jit
def part_of(
    pairs, PART: tl.constexpr, BITS: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr, E2M1: tl.constexpr = False
):
    """[…] of two words each -> […, 2]: the integers of one part, exactly, but so much larger that the middle is
    `zero_of`: whoever sums them up takes that away from the sum. 8 bits fit into float16 only. Numbers of e2m1 are
    what they are."""
    tl.static_assert(BITS == 4 or not BFLOAT16)
    INSTRUCTIONS: tl.constexpr = _e2m1_instructions(PART, BFLOAT16) if E2M1 else _instructions(BITS, PART, BFLOAT16)
    if E2M1 and not PTX:
        wide = tl.join(_e2m1_of((pairs >> (4 * PART)) & 15), _e2m1_of((pairs >> (4 * PART + 16)) & 15))
        result = wide.to(tl.bfloat16) if BFLOAT16 else wide.to(tl.float16)
    elif not PTX:
        low = (pairs >> (BITS * PART)) & ((1 << BITS) - 1)
        high = (pairs >> (BITS * PART + 16)) & ((1 << BITS) - 1)
        wide = tl.join(low, high).to(tl.float32) + (128.0 if BFLOAT16 else 1024.0)
        result = wide.to(tl.bfloat16) if BFLOAT16 else wide.to(tl.float16)
    elif BFLOAT16:
        low, high = tl.inline_asm_elementwise(
            INSTRUCTIONS, "=h,=h,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
        result = tl.join(low, high)
    else:
        low, high = tl.inline_asm_elementwise(
            INSTRUCTIONS, "=h,=h,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )
        result = tl.join(low, high)
    return result
