"""Inline PTX for kernels that Triton's own layouts keep from full speed: reads of 16 bytes, integers widened in
registers, one `mma` of a warp. Ampere and later; the kernels that use it have the figures.

A tensor here has one element per thread. A product is m16n8k16: 16 outputs, 8 rows, 16 columns; thread (g, t) of a warp
has of the weights outputs g and g + 8, of the rows row g, of the sums outputs g and g + 8 of rows 2t and 2t + 1.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _reading(early):
    return f"ld.global{'' if early else '.nc'}.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4];"


@triton.jit
def read_weights(pointer, EARLY: tl.constexpr):
    """16 bytes that nobody reads again, as four numbers. `EARLY`: the assembler may not put it off until after a wait,
    and it takes registers meanwhile."""
    INSTRUCTION: tl.constexpr = _reading(EARLY)
    return tl.inline_asm_elementwise(
        INSTRUCTION,
        "=r,=r,=r,=r,l",
        [pointer.to(tl.int64)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def read_rows(pointer, inside):
    """16 bytes of what another kernel may just have written, or zeros."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r",
        [pointer.to(tl.int64), inside.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def shrunk_to_float16(pair):
    """Two bfloat16 of a register, divided by 16."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a, b; .reg .b32 t; shl.b32 t, $1, 16; mov.b32 a, t; and.b32 t, $1, 0xFFFF0000; mov.b32 b, t; "
        "mul.f32 a, a, 0f3D800000; mul.f32 b, b, 0f3D800000; cvt.rn.f16x2.f32 $0, b, a; }",
        "=r,r",
        [pair],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.constexpr_function
def _widening(bits, part, bfloat16):
    """A shift, a mask with which an exponent is put before each of two integers, and the middle taken away."""
    mask = "0x000F000F" if bits == 4 else "0x00FF00FF"
    exponent, kind, one = ("0x43004300", "bf16x2", "0x3F803F80") if bfloat16 else ("0x64006400", "f16x2", "0x3C003C00")
    middle = "0xC308C308" if bfloat16 else "0xE408E408" if bits == 4 else "0xE480E480"  # -136, -1032, -1152
    lines = [f"{{ .reg .b32 t, one, middle; mov.b32 one, {one}; mov.b32 middle, {middle};"]
    for i in range(4):
        lines.append(f"shr.u32 t, ${4 + i}, {bits * part};" if part else f"mov.b32 t, ${4 + i};")
        lines.append(f"lop3.b32 t, t, {mask}, {exponent}, 0xEA; fma.rn.{kind} ${i}, t, one, middle;")
    return " ".join([*lines, "}"])


@triton.jit
def widen(a, b, c, d, PART: tl.constexpr, BITS: tl.constexpr, BFLOAT16: tl.constexpr):
    """The integers of one part of each word, two to a register, exactly."""
    INSTRUCTIONS: tl.constexpr = _widening(BITS, PART, BFLOAT16)
    return tl.inline_asm_elementwise(
        INSTRUCTIONS,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [a, b, c, d],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.constexpr_function
def _product(bfloat16):
    kind = "bf16" if bfloat16 else "f16"
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )


@triton.jit
def mma(weights, rows_low, rows_high, sums, BFLOAT16: tl.constexpr):
    INSTRUCTIONS: tl.constexpr = _product(BFLOAT16)
    return tl.inline_asm_elementwise(
        INSTRUCTIONS,
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [weights[0], weights[1], weights[2], weights[3], rows_low, rows_high, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def sum_of_turns(sums, TURN: tl.constexpr, TILES: tl.constexpr):
    """Sums of a product, those of a tile's TURN warps together: [tiles * 128]"""
    mine = tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3]))
    return tl.sum(tl.reshape(mine, [TURN, TILES * 128]), axis=0)


@triton.jit
def places_of_sums(TILES: tl.constexpr):
    """Output and row of each: of a tile (g, t), then the row's and the output's last bits."""
    i = tl.arange(0, TILES * 128)
    return (tl.program_id(0) * TILES + i // 128) * 16 + i // 16 % 8 + i % 2 * 8, i // 4 % 4 * 2 + i // 2 % 2


@triton.jit
def mma_s8(weights, more_weights, rows, sums):
    """16 outputs, 8 rows and 64 columns of 8-bit integers. `weights` and `more_weights` are outputs g and g + 8."""
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0, $1, $2, $3}, {$4, $8, $5, $9}, {$12, $13}, {$16, $17, $18, $19}; "
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0, $1, $2, $3}, {$6, $10, $7, $11}, {$14, $15}, {$0, $1, $2, $3};",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [
            weights[0],
            weights[1],
            weights[2],
            weights[3],
            more_weights[0],
            more_weights[1],
            more_weights[2],
            more_weights[3],
            rows[0],
            rows[1],
            rows[2],
            rows[3],
            sums[0],
            sums[1],
            sums[2],
            sums[3],
        ],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
