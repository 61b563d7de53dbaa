"""Down projection of a token's experts and their weighted sum in one kernel, for one token, or a few that hardly share
experts. A token of Qwen3-30B-A3B, gate_up before it included, reads at 67 % of the H200's bandwidth
(docs/benchmarks.md).

Each expert has warps of its own, so all read at once, and nothing goes through memory between them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.linear.gemv import SHRINK
from penstock.model.ops.triton.moe.grouped_gemm import Stack, grows, shrunk, widen_bytes


def can_sum(weight: Stack, per_token: int, tiling: Tiling) -> bool:
    """Whether `down_combine` fits: every warp has as much to do as any other."""
    outputs, columns = weight.values.shape[1:]
    is_even = outputs % tiling.block_n == 0 and columns % (tiling.block_k * tiling.split_k) == 0
    return is_even and triton.next_power_of_2(per_token) == per_token


def down_combine(
    x: Tensor, weight: Stack, ids: Tensor, shares: Tensor, tiling: Tiling, *, dtype: torch.dtype
) -> Tensor:
    """Products of each token's pairs with their experts, weighed and summed: [tokens, out] from [pairs, in].

    Tokens are not put together: for one of them, or for a few that hardly share an expert. `tiling.split_k` warps have
    a part each of what one expert is to sum up.
    """
    (tokens, per_token), outputs = ids.shape, weight.outputs
    out = x.new_empty(tokens, outputs, dtype=dtype)
    x = shrunk(x) if weight.is_bytes else x
    _down_combine_kernel[(outputs // tiling.block_n, tokens)](
        x,
        ids,
        shares,
        weight.values,
        weight.scales,
        weight.bias,
        out,
        OUTPUTS=outputs,
        COLUMNS=weight.values.shape[2],
        PER_TOKEN=per_token,
        IS_BYTES=weight.is_bytes,
        IS_SHRUNK=grows(weight, dtype),
        HAS_BIAS=weight.bias is not None,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        SPLIT_K=tiling.split_k,
        STAGES=tiling.num_stages,
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        launch_pdl=has_pdl(),
    )
    return out


@triton.jit
def _down_combine_kernel(
    x_ptr,
    ids_ptr,
    shares_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    IS_BYTES: tl.constexpr,
    IS_SHRUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums [experts and their warps, outputs, 8]: a product takes no fewer rows, and but the first are zero."""
    launch_dependents(PDL)
    group = tl.arange(0, PER_TOKEN * SPLIT_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = (group % SPLIT_K)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    is_first = tl.arange(0, 8)[None, None, :] + k[:, :, None] * 0 == 0
    wait_for_previous(PDL)
    pair = tl.program_id(1) * PER_TOKEN + group // SPLIT_K
    expert = tl.load(ids_ptr + pair).to(tl.int64)  # -1: elsewhere, and its row was not made
    is_first = is_first & (expert >= 0)[:, None, None]
    line = tl.maximum(expert, 0)[:, None] * OUTPUTS + n[None, :]
    share = tl.load(shares_ptr + pair)
    weights = weight_ptr + line[:, :, None] * COLUMNS + k[:, None, :]
    rows = x_ptr + (pair.to(tl.int64)[:, None] * COLUMNS + k)[:, :, None] + tl.arange(0, 8)[None, None, :] * 0
    acc = tl.zeros([PER_TOKEN * SPLIT_K, BLOCK_N, 8], tl.float32)
    for start in tl.range(0, COLUMNS, SPLIT_K * BLOCK_K, num_stages=STAGES):
        weight = tl.load(weights + start, eviction_policy="evict_first")
        x = tl.load(rows + start, mask=is_first, other=0.0)
        acc = tl.dot(widen_bytes(weight, x.dtype), x, acc)
    made = tl.sum(acc, axis=2)  # [groups, outputs]
    if IS_BYTES:
        made *= tl.load(scales_ptr + line)
    if IS_SHRUNK:
        made *= 1 / SHRINK
    if HAS_BIAS:  # one of an expert's warps adds it
        is_theirs = (group % SPLIT_K == 0) & (expert >= 0)
        made += tl.load(bias_ptr + line, mask=is_theirs[:, None], other=0.0).to(tl.float32)
    total = tl.sum(made * share[:, None], axis=0)
    tl.store(out_ptr + tl.program_id(1) * OUTPUTS + n, total.to(out_ptr.dtype.element_ty))
