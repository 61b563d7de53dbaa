"""A mixture's layers: who is chosen, and the experts' products. Choices are random, and others in every call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from penstock.model.ops import ExpertWeights, Norm, Stream
from penstock.model.ops.experts import route
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.moe import experts, routing
from penstock.model.ops.triton.moe.experts import GroupedExperts
from penstock.model.ops.triton.moe.grouped_gemm import SWIGLU, Stack
from penstock.model.sparse import SparseMLP
from penstock.quant import Quant, to_quant

from .timing import DTYPE, bandwidth, each_us, randn, throughput, tried

QUANTS: tuple[Quant, ...] = ("none", "fp8", "w8a8", "int8", "int4", "mxfp4")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192)
CALLS = 6  # with choices of their own
BYTES = {
    "none": 2.0,
    "fp8": 1.0,
    "w8a8": 1.0,
    "int8": 1.0 + 2 / 128,
    "int4": 0.5 + 2 / 128,
    "mxfp4": 0.5 + 1 / 32,
}  # of a weight


class Mixture(NamedTuple):
    experts: int
    per_token: int
    hidden: int
    ffn: int

    @property
    def expert(self) -> int:
        """Weights of one."""
        return 3 * self.hidden * self.ffn

    def pairs(self, quant: Quant) -> Iterator[ExpertWeights]:
        for _ in range(self.experts):
            gate_up, down = randn(2 * self.ffn, self.hidden), randn(self.hidden, self.ffn)
            yield ExpertWeights(to_quant(quant, gate_up * self.hidden**-0.5), to_quant(quant, down * self.ffn**-0.5))

    def stacked(self, quant: Quant) -> GroupedExperts:
        made = TritonOps("cuda", DTYPE).experts(self.experts, self.pairs(quant))
        assert isinstance(made, GroupedExperts)
        return made

    def choices(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        noise = torch.rand(CALLS, rows, self.experts, device="cuda")
        return [routing.topk(each, self.per_token, normalized=True) for each in noise]


MIXTURES = {
    "mixtral": Mixture(8, 2, 4096, 14336),
    "qwen3-30b": Mixture(128, 8, 2048, 768),
    "gpt-oss": Mixture(32, 4, 2880, 2880),
}


def mixtures() -> None:
    """The experts alone; and a layer's whole MLP, with the norm, the router and its choice."""
    for name, mixture in MIXTURES.items():
        for quant in QUANTS:
            made = mixture.stacked(quant)
            for rows in ROWS:
                print(f"experts {name:9} {quant:5} {rows:5} rows: {tried(experts_rate, mixture, made, rows, quant)}")
                if quant == "none" and rows <= 64:
                    print(f"MLP     {name:9} {quant:5} {rows:5} rows: {mlp_us(mixture, made, rows):9.1f} µs")


def experts_rate(mixture: Mixture, made: GroupedExperts, rows: int, quant: Quant) -> str:
    x, choices = randn(rows, mixture.hidden), mixture.choices(rows)
    us = each_us(lambda i: made(x, *choices[i]), CALLS)
    num_bytes = touched(choices) * mixture.expert * BYTES[quant]
    return f"{bandwidth(num_bytes, us)} {throughput(2 * rows * mixture.per_token * mixture.expert, us)[12:]}"


def touched(choices: list[tuple[Tensor, Tensor]]) -> float:
    """Experts that somebody chose, in a call."""
    return sum(len(ids.unique()) for ids, _ in choices) / CALLS


def mlp_us(mixture: Mixture, made: GroupedExperts, rows: int) -> float:
    ops, x = TritonOps("cuda", DTYPE), randn(CALLS, rows, mixture.hidden)
    norm = Norm(torch.ones(mixture.hidden, device="cuda", dtype=DTYPE), 1e-5)
    routers = [ops.linear(randn(mixture.experts, mixture.hidden)) for _ in range(CALLS)]
    mlps = [SparseMLP(ops, norm, router, made, None, mixture.per_token, normalized=True) for router in routers]
    return each_us(lambda i: mlps[i](Stream(x[i], x[i - 1])), CALLS)


def routers() -> None:
    """Prints what there is to do beside the products, and torch's way of choosing beside ours."""
    for name, mixture in MIXTURES.items():
        for rows in (2, 64, 2048):
            print(f"{name:9} {rows:5} rows: {routing_us(mixture, rows)}")


def routing_us(mixture: Mixture, rows: int) -> str:
    logits, choices = randn(CALLS, rows, mixture.experts), mixture.choices(rows)
    made = randn(rows * mixture.per_token, mixture.hidden)
    ours = each_us(lambda i: routing.topk(logits[i], mixture.per_token, normalized=True), CALLS)
    theirs = each_us(lambda i: route(logits[i], mixture.per_token, normalized=True), CALLS)
    sort = each_us(lambda i: routing.blocks_of(choices[i][0], mixture.experts, 1), CALLS)
    total = each_us(lambda i: routing.combine(made, choices[i][1]), CALLS)
    return f"choice {ours:.1f} µs, torch's {theirs:.1f}; by experts {sort:.1f}; sum {total:.1f}"


class Case(NamedTuple):
    """A product with a tiling that may be better than the one in the sources."""

    mixture: str
    quant: Quant
    is_up: bool
    tokens: int
    block: int  # rows
    tiling: Tiling

    def __str__(self) -> str:
        side = "gate_up" if self.is_up else "down"
        sizes = f"{self.tokens:4} tokens, {self.block:3} a block, {self.tiling}"
        return f"{self.mixture:9} {self.quant:5} {side:7} {sizes}"


FEW = [
    Tiling(block_n=outputs, block_k=columns, split_k=split, num_warps=warps, num_stages=stages)
    for outputs, columns, split, warps, stages in (
        (16, 256, 2, 2, 4),
        (16, 128, 4, 4, 4),
        (32, 128, 2, 2, 4),
        (32, 128, 4, 4, 3),
        (32, 128, 4, 4, 4),
        (32, 64, 4, 4, 5),
        (64, 64, 4, 4, 4),
        (64, 128, 4, 4, 3),
        (64, 64, 8, 8, 3),
    )
]
FEW_BYTES = [
    Tiling(block_n=outputs, block_k=columns, split_k=split, num_warps=warps, num_stages=stages)
    for outputs, columns, split, warps, stages in (
        (32, 256, 4, 4, 4),
        (32, 256, 2, 2, 4),
        (32, 128, 4, 4, 4),
        (32, 128, 4, 4, 6),
        (64, 128, 4, 4, 4),
        (64, 64, 4, 4, 6),
    )
]
MANY = [
    Tiling(block_n=outputs, block_k=columns, split_k=split, num_warps=warps, num_stages=stages)
    for outputs, columns, split, warps, stages in (
        (128, 64, 1, 4, 4),
        (128, 64, 1, 8, 4),
        (64, 128, 1, 4, 4),
        (256, 64, 1, 8, 3),
        (256, 64, 1, 8, 4),
        (128, 128, 1, 8, 3),
    )
]


def cases() -> Iterator[Case]:
    few: list[tuple[Quant, list[Tiling]]] = [("none", FEW), ("fp8", FEW_BYTES)]
    for name, mixture in MIXTURES.items():
        for is_up in (True, False):
            columns = mixture.hidden if is_up else mixture.ffn
            for quant, tilings in few:
                for tokens, block in ((1, 8), (16, 16)):
                    found = [each for each in tilings if columns % (each.block_k * each.split_k) == 0]
                    yield from (Case(name, quant, is_up, tokens, block, each) for each in found)
            for tokens, blocks in ((256, (16, 32, 64)), (2048, (64, 128))):
                for block in blocks:
                    yield from (Case(name, "none", is_up, tokens, block, each) for each in MANY)


class Sweep:
    """Times products of one layer after the other."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[str, Quant], GroupedExperts] = {}

    def rate(self, case: Case) -> str:
        mixture = MIXTURES[case.mixture]
        if (case.mixture, case.quant) not in self._stacks:
            self._stacks.clear()
            self._stacks[case.mixture, case.quant] = mixture.stacked(case.quant)
        made = self._stacks[case.mixture, case.quant]
        return tried(product_rate, case, made.gate_up if case.is_up else made.down)


def product_rate(case: Case, stack: Stack) -> str:
    mixture = MIXTURES[case.mixture]
    rows = case.tokens * (1 if case.is_up else mixture.per_token)
    x = randn(rows, mixture.hidden if case.is_up else mixture.ffn)
    choices = mixture.choices(case.tokens)
    blocks = [routing.blocks_of(ids, mixture.experts, case.block) for ids, _ in choices]
    with patch.object(experts, "tiling_of", lambda *_: case.tiling):
        us = each_us(
            lambda i: experts.multiply(x, stack, blocks[i], gate=SWIGLU if case.is_up else None, dtype=DTYPE), CALLS
        )
    weights = mixture.expert * (2 if case.is_up else 1) / 3
    flops = 2 * case.tokens * mixture.per_token * weights
    return f"{bandwidth(touched(choices) * weights * BYTES[case.quant], us)} {throughput(flops, us)[12:]}"


def sweep_experts() -> None:
    sweep = Sweep()
    for case in sorted(cases(), key=lambda case: (case.mixture, case.quant)):
        print(f"{case}: {sweep.rate(case)}")
