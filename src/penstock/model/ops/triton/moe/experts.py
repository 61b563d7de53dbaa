"""The experts of a layer on a GPU, in any format: how they are stacked, and which kernel multiplies how many rows. With
few rows reading weights is the limit, with many arithmetic: `grouped_gemm` has the shares.

A step is three launches, or four: gate_up with SwiGLU, down, and the sum of each token's experts; rows of more than a
few tokens are put together by their experts first. Nothing is read on the host, so a CUDA graph may hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelCorrupt
from penstock.core.model_config import Activation, ClampedSwiGLU
from penstock.model.ops import ExpertWeights
from penstock.model.ops.triton.common.device import capability
from penstock.model.ops.triton.common.rowwise import silu_mul
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.linear.int4_pack import PackedWeight, can_pack, narrowed, pack, pack_mxfp4
from penstock.model.ops.triton.moe import grouped_gemm, w4a16_experts
from penstock.model.ops.triton.moe.down_combine import can_sum, down_combine
from penstock.model.ops.triton.moe.grouped_gemm import SWIGLU, Gate, Stack
from penstock.model.ops.triton.moe.routing import FEW, Blocks, blocks_of, combine, reordered
from penstock.model.ops.triton.moe.w4a16_experts import TILE, PackedStack
from penstock.model.quantized import Weight, plain
from penstock.model.quantized.fp8 import Fp8Weight
from penstock.model.quantized.grouped import GroupedWeight
from penstock.model.quantized.int8 import Int8Weight
from penstock.model.quantized.mxfp4 import Mxfp4Weight

ALONE = 4  # times as many experts as pairs: then each token sums up its own
LONG = 4096  # columns: more are shared by more warps
MANY = 256  # rows an expert: of long ones torch's product of groups is faster then, though rows are gathered for it


@dataclass(frozen=True)
class GroupedExperts:
    gate_up: Stack | PackedStack
    down: Stack | PackedStack
    pack: Callable[[Weight, Tensor | None], Stack | PackedStack]  # a stack of one expert
    is_part: bool = False  # other ranks have more of the layer's experts: some pairs are elsewhere
    gate: Gate = SWIGLU

    def put(self, slot: int, expert: ExpertWeights) -> None:
        """See `ExpertLinears.put`."""
        _put(self.pack(expert.gate_up, expert.gate_up_bias), self.gate_up, slot)
        _put(self.pack(expert.down, expert.down_bias), self.down, slot)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        dtype, (count, mean) = x.dtype, self._load(ids)
        blocks = blocks_of(ids, count, self._rows(ids.shape[0], mean, dtype))
        if mean >= MANY and not self.is_part and self.gate == SWIGLU and _torch_groups(self.gate_up, self.down):
            return combine(self._by_torch(x, blocks), weights)
        sums = self._sums(ids, dtype)
        meets_bytes = isinstance(self.gate_up, Stack) and _is_bytes(self.down) and blocks.rows <= FEW
        shrinks = meets_bytes and dtype is torch.bfloat16
        gated = multiply(x, self.gate_up, blocks, gate=self.gate, dtype=dtype, shrinks=shrinks)
        if sums is not None:
            assert isinstance(self.down, Stack)
            return down_combine(gated, self.down, ids, weights, sums, dtype=dtype)
        return combine(multiply(gated, self.down, blocks, gate=None, dtype=dtype), weights)

    def _load(self, ids: Tensor) -> tuple[int, float]:
        """How many experts there are, and rows for each."""
        count = self.down.values.shape[0]
        return count, ids.numel() / count

    def _sums(self, ids: Tensor, dtype: torch.dtype) -> Tiling | None:
        """If so few experts are named twice that reading them twice is the lesser evil: how a token sums up its own."""
        (tokens, per_token), (count, _) = ids.shape, self._load(ids)
        if isinstance(self.down, PackedStack) or dtype is torch.float32 or (tokens > 1 and ids.numel() * ALONE > count):
            return None
        tiling = summing_tiling(self.down, per_token)
        return tiling if can_sum(self.down, per_token, tiling) else None

    def _rows(self, tokens: int, mean: float, dtype: torch.dtype) -> int:
        """Rows of a block: as many as most experts have, so that few read their weights twice."""
        if dtype is torch.float32:
            return 16 if tokens <= FEW or mean <= 16 else 64
        if tokens <= 8 or (mean <= 4 and not _is_plain(self.gate_up)):  # rows that are not there are widened for too
            return 8
        if tokens <= FEW or any(isinstance(each, PackedStack) and not each.fits_gemm for each in self._both):
            return FEW
        return next((rows for rows, most in ((16, 10), (32, 24), (64, 56)) if mean <= most), 128)

    @property
    def _both(self) -> tuple[Stack | PackedStack, Stack | PackedStack]:
        return self.gate_up, self.down

    def _by_torch(self, x: Tensor, blocks: Blocks) -> Tensor:
        """A row for every pair."""
        assert blocks.order is not None
        rows = x.index_select(0, blocks.order // blocks.ids.shape[1])
        halves = F.grouped_mm(rows, self.gate_up.values.transpose(1, 2), offs=blocks.ends)
        found = F.grouped_mm(silu_mul(halves), self.down.values.transpose(1, 2), offs=blocks.ends)
        return torch.empty_like(found).index_copy_(0, blocks.order.long(), found)


def _is_plain(weight: Stack | PackedStack) -> bool:
    return isinstance(weight, Stack) and not weight.is_bytes


def _is_bytes(weight: Stack | PackedStack) -> bool:
    return isinstance(weight, Stack) and weight.is_bytes


def _torch_groups(gate_up: Stack | PackedStack, down: Stack | PackedStack) -> bool:
    """Whether torch has a kernel for it; where it has none, it asks the device whose rows are whose, and waits."""
    weights = gate_up.values, down.values
    return (
        gate_up.bias is None
        and down.bias is None
        and all(values.dtype is torch.bfloat16 for values in weights)
        and all(size % 8 == 0 for values in weights for size in values.shape[1:])  # rows begin at 16 bytes
        and down.values.shape[2] > LONG
        and capability(down.values.device) >= (9, 0)
    )


def multiply(
    x: Tensor,
    weight: Stack | PackedStack,
    blocks: Blocks,
    *,
    gate: Gate | None,
    dtype: torch.dtype,
    shrinks: bool = False,
) -> Tensor:
    if isinstance(weight, Stack):
        tiling = tiling_of(weight, blocks.rows)
        return grouped_gemm.product(x, weight, blocks, tiling, gate=gate, dtype=dtype, shrinks=shrinks)
    assert not shrinks
    if weight.order is not None:
        x = reordered(x, weight.order, blocks)
    tiling = words_tiling(weight) if blocks.rows <= FEW else many_words_tiling(weight, blocks.rows)
    return w4a16_experts.product(x, weight, blocks, tiling, gate=gate)


def tiling_of(weight: Stack, rows: int) -> Tiling:
    """The fastest on an H200 of those that `tools.gpu_ops sweep-experts` tries, of Mixtral's and Qwen3-30B-A3B's."""
    columns = weight.values.shape[2]
    if weight.values.element_size() == 4:
        return Tiling(block_n=64, block_k=32, num_warps=4, num_stages=2)
    if rows <= FEW and weight.is_bytes:
        block_k = 128 if columns <= LONG else 256
        return _fitted(Tiling(block_n=32, block_k=block_k, split_k=4, num_warps=4, num_stages=4), columns)
    if rows <= FEW:
        split, stages = (2, 4) if columns <= LONG else (4, 3)
        return _fitted(Tiling(block_n=32, block_k=128, split_k=split, num_warps=split, num_stages=stages), columns)
    long = 128 if weight.is_bytes else 64
    if rows <= 64:
        return Tiling(block_n=128, block_k=long, num_warps=4, num_stages=4)
    stages = 3 if weight.is_bytes or columns > LONG else 4
    return Tiling(block_n=256, block_k=long, num_warps=8, num_stages=stages)


def summing_tiling(weight: Stack, per_token: int) -> Tiling:
    split = max(8 // per_token, 1)
    block_k = 256 if weight.is_bytes else 128
    tiling = Tiling(block_n=16, block_k=block_k, split_k=split, num_warps=per_token * split, num_stages=4)
    return _fitted(tiling, weight.values.shape[2])


def _fitted(tiling: Tiling, columns: int) -> Tiling:
    """Turns that the columns are a multiple of, if there are any that are not too short."""
    split, width = tiling.split_k, tiling.block_k
    while columns % (split * width) and (split > 2 or width > 32):
        split, width = (split // 2, width) if split > 2 else (split, width // 2)
    if columns % (split * width):
        return tiling
    return replace(tiling, block_k=width, split_k=split, num_warps=tiling.num_warps * split // tiling.split_k)


def words_tiling(weight: PackedStack) -> Tiling:
    """All of a program's chunks are one straight run of instructions: not more than eight turns."""
    chunks = weight.values.shape[2]
    warps = next(warps for warps in (4, 8, 16, 32) if chunks <= 8 * 2 * warps or warps == 32)
    return Tiling(block_n=2 * TILE, split_k=2 * warps, num_warps=warps)


def many_words_tiling(weight: PackedStack, rows: int) -> Tiling:
    outputs = 64 if weight.outputs % 128 == 0 else 2 * TILE
    return Tiling(block_m=rows, block_n=outputs, num_warps=4, num_stages=3)


def stacked(
    weights: Iterable[ExpertWeights],
    count: int,
    dtype: torch.dtype,
    device: torch.device,
    keeps: tuple[type, ...],
    activation: Activation = "silu",
) -> GroupedExperts:
    """`keeps`: the formats that the device multiplies as they are. Others are widened to `dtype`, and take more memory.
    Experts come one by one, and each is packed and put in its place before the next."""
    stacks: list[Stack | PackedStack] = []
    pack = partial(_stack_of_one, dtype=dtype, keeps=keeps)
    for expert, each in enumerate(weights):
        for side, weight in enumerate(((each.gate_up, each.gate_up_bias), (each.down, each.down_bias))):
            one = pack(*weight)
            if len(stacks) == side:
                stacks.append(_mapped(one, lambda tensor: tensor.new_empty(count, *tensor.shape[1:], device=device)))
            _put(one, stacks[side], expert)
    gate_up, down = stacks
    gate = Gate(activation.alpha, activation.limit) if isinstance(activation, ClampedSwiGLU) else SWIGLU
    return GroupedExperts(gate_up, down, pack, gate=gate)


def _stack_of_one(
    weight: Weight, bias: Tensor | None, dtype: torch.dtype, keeps: tuple[type, ...]
) -> Stack | PackedStack:
    bias = None if bias is None else bias.to(dtype)[None]
    if isinstance(weight, GroupedWeight) and GroupedWeight in keeps and can_pack(weight):
        order = None if weight.order is None else weight.order[None].int()
        return _words_of_one(pack(narrowed(weight)), bias, order)
    if isinstance(weight, Mxfp4Weight) and Mxfp4Weight in keeps:
        return _words_of_one(pack_mxfp4(weight), bias)
    if isinstance(weight, Fp8Weight | Int8Weight) and type(weight) in keeps:
        return Stack(weight.values[None], weight.scales[None].float(), bias)
    return Stack(plain(weight).to(dtype)[None], bias=bias)


def _words_of_one(words: PackedWeight, bias: Tensor | None, order: Tensor | None = None) -> PackedStack:
    offsets = None if words.offsets is None else words.offsets[None]
    return PackedStack(
        words.values[None], words.scales[None], offsets, words.bits, words.outputs, words.columns, bias, order=order
    )


def _mapped(stack: Stack | PackedStack, change: Callable[[Tensor], Tensor]) -> Stack | PackedStack:
    changed: dict[str, Any] = {name: change(tensor) for name, tensor in _tensors(stack).items()}
    return replace(stack, **changed)


def _put(one: Stack | PackedStack, stack: Stack | PackedStack, expert: int) -> None:
    if _format(one) != _format(stack):
        raise ModelCorrupt(f"expert {expert} of a layer is not in the format of the first")
    places = _tensors(stack)
    for name, tensor in _tensors(one).items():
        places[name][expert] = tensor[0]


def _format(stack: Stack | PackedStack) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape[1:], tensor.dtype) for name, tensor in _tensors(stack).items()}


def _tensors(stack: Stack | PackedStack) -> dict[str, Tensor]:
    found = {field.name: getattr(stack, field.name) for field in fields(stack)}
    return {name: each for name, each in found.items() if isinstance(each, Tensor)}
