"""The cost that adapters add to a layer's linears: every row its own, and long runs of one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.lora.shrink_expand import (
    UNIT,
    Pairs,
    Tilings,
    add_few,
    add_many,
    entries_of,
    expand_few,
    few_tilings,
    many_tilings,
    shrink_few,
)

from .timing import DTYPE, MODELS, bandwidth, graph_us, randn, throughput, tried

RANK = 16
LAYERS = 16  # what a layer reads, the next does not find in the L2 cache


class Sites:
    """One kind of linear in many layers, with as many adapters as rows."""

    def __init__(self, name: str, num_slots: int, rank: int = RANK) -> None:
        self.name, self.num_slots, self.rank = name, num_slots, rank
        model = MODELS["8B"]
        heads, kv_heads = model.hidden, model.kv_heads * model.dim
        self.inputs, self.outputs = {
            "qkv": (model.hidden, (heads, kv_heads, kv_heads)),
            "output": (model.hidden, (model.hidden,)),
            "gate_up": (model.hidden, (model.ffn, model.ffn)),
            "down": (model.ffn, (model.hidden,)),
        }[name]
        sizes = [rank * size for out in self.outputs for size in (self.inputs, out)]
        starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        values = randn(LAYERS, num_slots, starts[-1]) * self.inputs**-0.5
        entry = [[a // UNIT, b // UNIT, rank, 0] for a, b in pairwise(starts[:-1])][::2]
        table = torch.tensor(entry, dtype=torch.int32, device="cuda").repeat(num_slots, 1, 1)
        table[:, :, :2] += torch.arange(num_slots, device="cuda")[:, None, None] * (starts[-1] // UNIT)
        self.table = torch.nn.functional.pad(table, (0, 0, 0, 0, 0, 1))
        self.pairs = [Pairs(each, self.table, 0, self.inputs, self.outputs) for each in values]

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """x and y of each layer; slots, in runs."""
        slots = torch.arange(count, device="cuda", dtype=torch.int32) * self.num_slots // count
        return randn(LAYERS, count, self.inputs), randn(LAYERS, count, sum(self.outputs)), slots.int()

    @property
    def num_bytes(self) -> int:
        """The bytes of a layer's adapters."""
        return self.num_slots * self.rank * (self.inputs * len(self.outputs) + sum(self.outputs)) * DTYPE.itemsize

    def few_us(self, tilings: Tilings | None = None) -> float:
        x, y, slots = self.rows(self.num_slots)
        entries = entries_of(self.table, slots)
        return graph_us(lambda: [add_few(x[i], y[i], entries, self.pairs[i], tilings) for i in range(LAYERS)], LAYERS)

    def few_rate(self) -> str:
        return bandwidth(self.num_bytes, self.few_us())

    def shrink_rate(self, tiling: Tiling) -> str:
        x, _, slots = self.rows(self.num_slots)
        entries = entries_of(self.table, slots)
        us = graph_us(lambda: [shrink_few(x[i], entries, self.pairs[i], tiling) for i in range(LAYERS)], LAYERS)
        return bandwidth(self.num_slots * self.rank * self.inputs * len(self.outputs) * DTYPE.itemsize, us)

    def expand_rate(self, tiling: Tiling) -> str:
        x, y, slots = self.rows(self.num_slots)
        entries = entries_of(self.table, slots)
        hidden = shrink_few(x[0], entries, self.pairs[0], few_tilings(self.num_slots).shrink)
        us = graph_us(lambda: [expand_few(hidden, y[i], entries, self.pairs[i], tiling) for i in range(LAYERS)], LAYERS)
        return bandwidth(self.num_slots * self.rank * sum(self.outputs) * DTYPE.itemsize, us)

    def many_rate(self, count: int, tilings: Tilings) -> str:
        x, y, slots = self.rows(count)
        us = graph_us(lambda: [add_many(x[i], y[i], slots, self.pairs[i], tilings) for i in range(LAYERS)], LAYERS)
        return throughput(2 * count * self.rank * (self.inputs * len(self.outputs) + sum(self.outputs)), us)


NAMES = ("qkv", "output", "gate_up", "down")


def adapters() -> None:
    for rows in (1, 8, 50, 64):
        for name in NAMES:
            print(f"adapters 8B {name:7} {rows:3} rows of as many: {tried(Sites(name, rows).few_rate)}")
    for count, slots in ((512, 1), (8192, 4)):
        for name in NAMES:
            rate = tried(Sites(name, slots).many_rate, count, many_tilings(DTYPE))
            print(f"adapters 8B {name:7} {count} rows of {slots}: {rate}")


def sweep_adapters() -> None:
    for name in ("qkv", "gate_up", "down"):
        sites, small = Sites(name, 50), Sites(name, 1)
        for inputs, warps in ((256, 2), (512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8)):
            tiling = replace(few_tilings(50).shrink, block_k=inputs, num_warps=warps)
            figures = "  ".join(tried(each.shrink_rate, tiling) for each in (sites, small))
            print(f"shrink {name:7} {inputs:5} {warps} warps, 50 and 1: {figures}")
        for outputs, warps in ((256, 1), (512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8)):
            tiling = replace(few_tilings(50).expand, block_n=outputs, num_warps=warps)
            figures = "  ".join(tried(each.expand_rate, tiling) for each in (sites, small))
            print(f"expand {name:7} {outputs:5} {warps} warps, 50 and 1: {figures}")
