"""Products with weights in the blocks of a GGUF: all the linears of a model, by format and rows."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

from penstock.model.ops import Linear
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.linear import q6k, w4a16_linear
from penstock.model.ops.triton.linear.w4a16_linear import MAX_ROWS
from penstock.model.quantized.grouped import Bits, GroupedWeight, packed
from penstock.quant import Quant

from .linears import Chain
from .timing import tried

BLOCKS: dict[str, tuple[Bits, int, bool]] = {  # bits, columns of a group, and whether it adds something
    "Q4_0": (4, 32, False),
    "Q4_K": (4, 32, True),
    "Q8_0": (8, 32, False),
    "Q6_K": (8, 16, False),
    "Q4_K and Q6_K": (8, 16, True),
}


class Blocks(Chain):
    """Any integers: how fast they are multiplied does not depend on them."""

    def __init__(self, name: str, kind: str) -> None:
        self.kind = kind
        super().__init__(name, "int4" if BLOCKS[kind][0] == 4 else "int8")
        self.name = f"{name} {kind}"

    def _linear(self, weight: Tensor, quant: Quant) -> Linear:
        bits, group, adds = BLOCKS[self.kind]
        out, columns = weight.shape
        values = torch.randint(0, 1 << bits, (out, columns), dtype=torch.uint8, device=weight.device)
        scales = torch.rand(out, columns // group, device=weight.device) * 0.01
        kept = GroupedWeight(packed(values) if bits == 4 else values, bits, scales, None, -scales if adds else None)
        linear = self.ops.linear(kept)
        assert isinstance(linear, w4a16_linear.W4A16Linear)
        self.weight_bytes += linear.weight.num_bytes
        return linear


def blocks() -> None:
    """Prints speeds as bandwidth of the weights; beyond a few rows, beside them those of a weight that is widened."""
    for kind in BLOCKS:
        chain = Blocks("8B", kind)
        for rows in (1, 8, 16, 32, 64):
            line = f"linears {chain.name:16} {rows:3} rows: {chain.rate(rows)}"
            if rows > MAX_ROWS:
                with patch.object(w4a16_linear, "MAX_SLICED", 0):
                    line += f", widened {chain.rate(rows)}"
                with patch.object(w4a16_linear, "MAX_SLICED", 64 * 8):
                    line += f", in slices {chain.rate(rows)}"
            print(line)


def sweep_q6k() -> None:
    """Tilings of a few rows with groups of 16."""
    chain = Blocks("8B", "Q6_K")
    for outputs, warps, split in ((16, 8, 16), (32, 8, 16), (32, 4, 8), (16, 16, 32), (16, 4, 8)):
        tiling = Tiling(block_n=outputs, split_k=split, num_warps=warps)
        with patch.object(q6k, "TILING", tiling):
            for rows in (1, 8, 16):
                print(f"{chain.name} {rows} rows {tiling}: {tried(chain.rate, rows)}")
