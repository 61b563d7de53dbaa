"""Steps of decodes alone as CUDA graphs: captured once for every batch size of a ladder, and replayed ever after.

A graph reads its inputs where they lay when it was captured, and is found by the sizes of what lies there. Smaller
batches are padded with sequences of no context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.ops.triton.common.argmax import argmax
from penstock.runner.step_inputs import Sizes


@dataclass(frozen=True)
class DecodeGraph:
    sizes: Sizes  # of the inputs that it reads
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [batch, vocab]
    best: Tensor  # [batch]: the greedy choice
    communication_s: float  # with other ranks, by estimate


class DecodeGraphs:
    def __init__(self, forward: Callable[[Sizes], Tensor], communication: Callable[[], float] | None = None) -> None:
        """`forward`: a step of nothing but decodes, on inputs of these sizes; its logits. `communication`: seconds with
        other ranks so far, by estimate: what is captured is counted once there, and again with each replay."""
        self._forward = forward
        self._communication = communication or (lambda: 0.0)
        self._graphs: dict[Sizes, DecodeGraph] = {}

    def __bool__(self) -> bool:
        return bool(self._graphs)

    def __getitem__(self, sizes: Sizes) -> DecodeGraph:
        return self._graphs[sizes]

    def capture(self, wanted: Iterable[Sizes]) -> None:
        """Largest first: the smaller ones share its memory. The inputs are those of a step of padding."""
        pool = torch.cuda.graph_pool_handle()
        for sizes in wanted:
            self._forward(sizes)  # compiles what was not compiled yet
            torch.cuda.synchronize()
            graph, before_s = torch.cuda.CUDAGraph(), self._communication()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._forward(sizes)
                best = best_of(logits)
            self._graphs[sizes] = DecodeGraph(sizes, graph, logits, best, self._communication() - before_s)


def best_of(logits: Tensor) -> Tensor:
    """The greedy choices. A stage of a pipeline that is not the last has no logits."""
    return argmax(logits) if len(logits) else logits.new_empty(0, dtype=torch.int64)


def graph_ladder(most: int) -> list[int]:
    """Batch sizes with a graph of their own: dense where a step is short, then every 16."""
    steps = [1, 2, 4, *range(8, 32, 8), *range(32, most, 16)]
    return [size for size in steps if size < most] + [most]


def coarse_ladder(most: int) -> list[int]:
    """Sizes of graphs that are rarely used: padding costs little, and each takes time to capture."""
    steps = [1, 2, 4, 8, 16, 32, *range(64, most, 64)]
    return [size for size in steps if size < most] + [most]


def rung(ladder: list[int], size: int) -> int:
    """The smallest that a batch of this size fits into."""
    return ladder[bisect_left(ladder, size)]
