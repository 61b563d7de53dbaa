"""Products with weights, and what is done with rows between them."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.ops import Linear, Norm, Scaled, Stream
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.common import rowwise
from penstock.model.ops.triton.common.argmax import argmax
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.linear import gemv, w4a16_gemv
from penstock.quant import Quant, to_quant

from .timing import DTYPE, FP8, MODELS, TIMED, bandwidth, copies_of, each_us, graph_us, randn, throughput, tried

VOCABULARY = 128256
QUANTS: tuple[Quant, ...] = ("none", "fp8", "w8a8", "int8", "int4")


def small() -> None:
    for rows in (1, 256, 8192):
        for name in TIMED:
            time_rowwise(name, rows)
    for rows in (1, 8, 256):
        num_bytes = rows * VOCABULARY * DTYPE.itemsize
        logits = randn(copies_of(num_bytes), rows, VOCABULARY)
        for name, choose in (("argmax", argmax), ("torch.argmax", lambda x: x.argmax(-1))):
            us = each_us(lambda i, choose=choose, logits=logits: choose(logits[i]), len(logits))
            print(f"{name:26} {rows:5} x {VOCABULARY}: {bandwidth(num_bytes, us)}")


def time_rowwise(name: str, rows: int) -> None:
    hidden, ffn = MODELS[name].hidden, MODELS[name].ffn
    copies = copies_of(rows * ffn * 3 * DTYPE.itemsize)
    x, residual = randn(2, copies, rows, hidden)
    gate_up = randn(copies, rows, 2 * ffn)
    norm, by_row = Norm(randn(hidden), 1e-5), rowwise.Quantization(None)
    row_scales, column_scales = torch.ones(rows, device="cuda"), torch.ones(hidden, device="cuda")

    def scaled(i: int) -> Stream:
        return Stream(residual[i], Scaled(x[i], row_scales, column_scales))

    cases: dict[str, tuple[Callable[[int], object], int]] = {  # and bytes of a row
        "norm": (lambda i: rowwise.rms_norm(Stream(x[i]), norm), 4 * hidden),
        "add, norm": (lambda i: rowwise.rms_norm(Stream(residual[i], x[i]), norm), 8 * hidden),
        "add, norm, quantize": (lambda i: rowwise.rms_norm(Stream(residual[i], x[i]), norm, by_row), 7 * hidden),
        "scale, add, norm, quantize": (lambda i: rowwise.rms_norm(scaled(i), norm, by_row), 7 * hidden),
        "SwiGLU": (lambda i: rowwise.silu_mul(gate_up[i]), 6 * ffn),
        "SwiGLU, quantize": (lambda i: rowwise.silu_mul(gate_up[i], by_row), 5 * ffn),
        "quantize": (lambda i: rowwise.quantize(x[i], by_row), 3 * hidden),
    }
    for kernel, (call, row_bytes) in cases.items():
        print(f"{kernel:26} {rows:5} x {name}: {bandwidth(rows * row_bytes, each_us(call, copies))}")


class Chain:
    """All the linears of a model, layer by layer, and what is fused with them. Attention is left out."""

    def __init__(self, name: str, quant: Quant) -> None:
        model = MODELS[name]
        self.name = f"{name} {'bf16' if quant == 'none' else quant}"
        self.ops, self.weight_bytes = TritonOps("cuda", DTYPE), 0
        self.layers = [
            [self._linear(randn(outputs, inputs) * inputs**-0.5, quant) for outputs, inputs in model.linears]
            for _ in range(model.layers)
        ]
        self.norm = Norm(torch.ones(model.hidden, device="cuda", dtype=DTYPE), 1e-5)

    def _linear(self, weight: Tensor, quant: Quant) -> Linear:
        kept = to_quant(quant, weight)
        self.weight_bytes += kept.nbytes if isinstance(kept, Tensor) else kept.num_bytes
        return self.ops.linear(kept)

    def step(self, x: Tensor) -> None:
        stream = Stream(x.clone())
        for qkv, output, gate_up, down in self.layers:
            heads = self.ops.norm_linear(stream, self.norm, qkv)
            attended = heads.view(-1)[: x.numel()].view_as(x)  # stands in for attention: dense, and of its size
            self.ops.add_linear(stream, attended, output)
            self.ops.feed_forward(stream, self.norm, gate_up, down)

    def rate(self, rows: int) -> str:
        x = randn(rows, self.norm.weight.shape[0])
        return bandwidth(self.weight_bytes, graph_us(lambda: self.step(x)))


def linears() -> None:
    """Whole steps, as bandwidth of the weights; with few rows, beside them those of cuBLAS."""
    for name in TIMED:
        for quant in QUANTS:
            chain = Chain(name, quant)
            for rows in (1, 2, 8, 16, 32, 64, 256):
                line = f"linears {chain.name:7} {rows:3} rows: {chain.rate(rows)}"
                if rows <= gemv.MAX_ROWS and quant in ("none", "fp8"):
                    with patch.object(gemv, "fits", lambda *_: False):
                        line += f", cuBLAS {tried(chain.rate, rows)}"
                print(line)


def sweep_gemv() -> None:
    numbers = [
        (16, 2, 256, 3),
        (16, 2, 256, 4),
        (16, 4, 128, 3),
        (16, 4, 128, 4),
        (16, 4, 64, 5),
        (32, 4, 64, 4),
        (32, 2, 128, 6),
        (32, 4, 128, 3),
        (32, 4, 128, 4),
        (32, 2, 256, 4),
        (64, 4, 128, 3),
    ]
    for name in TIMED:
        for quant in ("none", "fp8"):
            chain = Chain(name, quant)
            for outputs, warps, columns, stages in numbers:
                tiling = Tiling(block_n=outputs, block_k=columns, split_k=warps, num_warps=warps, num_stages=stages)
                with patch.object(gemv, "_tiling", lambda *_, tiling=tiling: tiling):
                    print(f"{chain.name:7} 8 rows {tiling}: {tried(chain.rate, 8)}")


def sweep_w4a16() -> None:
    """Tilings of a few rows with 4-bit integers, all linears of a model."""
    for outputs, warps, stages in ((64, 8, 3), (32, 8, 3), (32, 8, 4), (32, 16, 3), (32, 16, 4), (64, 16, 3)):
        chain = Chain("8B", "int4")
        tiling = Tiling(block_n=outputs, num_warps=warps, num_stages=stages)
        with patch.object(w4a16_gemv, "tiling_of", lambda *_, tiling=tiling: tiling):
            for rows in (1, 8, 16):
                print(f"{chain.name:7} {rows} rows {tiling}: {tried(chain.rate, rows)}")


def products() -> None:
    """cuBLAS: bf16, and FP8 scaled by tensor or by row, summed as exactly as it can or fast."""
    for name in ("8B", "70B"):
        for outputs, inputs in MODELS[name].linears:
            weights = randn(copies_of(outputs * inputs), outputs, inputs)
            weights8 = weights.to(FP8)
            for rows in (16, 64, 256, 2048, 8192):
                x = randn(rows, inputs)
                print(f"{name} {outputs} x {inputs}, {rows} rows")
                print(f"    {'bf16':19}{tried(product_rate, x, weights)}")
                for by_row in (False, True):
                    for fast in (False, True):
                        kind = f"FP8 by {'row' if by_row else 'tensor'}{', fast' if fast else ''}"
                        print(f"    {kind:19}{tried(scaled_rate, x.to(FP8), weights8, by_row, fast)}")


def product_rate(x: Tensor, weights: Tensor) -> str:
    return throughput(2 * len(x) * weights[0].numel(), each_us(lambda i: F.linear(x, weights[i]), len(weights)))


def scaled_rate(x: Tensor, weights: Tensor, by_row: bool, fast: bool) -> str:
    rows, columns = (len(x), weights.shape[1]) if by_row else (1, 1)
    scales = torch.ones(rows, 1, device="cuda"), torch.ones(1, columns, device="cuda")

    def product(i: int) -> Tensor:
        return torch._scaled_mm(x, weights[i].t(), *scales, out_dtype=DTYPE, use_fast_accum=fast)

    return throughput(2 * len(x) * weights[0].numel(), each_us(product, len(weights)))
