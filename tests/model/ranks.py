"""Ranks of one model as threads of one process: real sums between real parts, without processes or sockets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from penstock.model.shard import Shard

T = TypeVar("T")


class ThreadRanks:
    """One rank's side. What all bring lies in `brought` while each makes of it what it wants."""

    def __init__(self, shard: Shard, barrier: Barrier, brought: list[Tensor]) -> None:
        self.shard = shard
        self.num_sums = 0
        self._barrier = barrier
        self._brought = brought

    def sum(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return self._exchanged(x, lambda parts: torch.stack(parts).sum(dim=0))

    def gather(self, x: Tensor, among: int | None = None) -> Tensor:
        count = among or self.shard.size
        first = self.shard.rank // count * count
        return self._exchanged(x, lambda parts: torch.cat(parts[first : first + count], dim=1))

    def exchange(self, x: Tensor) -> Tensor:
        near, place = self.shard.neighbours, self.shard.tokens.place
        return self._exchanged(x, lambda parts: torch.stack([parts[rank][place] for rank in near]))

    def broadcast(self, x: Tensor) -> Tensor:
        return self._exchanged(x, lambda parts: parts[0])

    def _exchanged(self, x: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self._brought[self.shard.rank] = x
        self._barrier.wait()
        found = combine(list(self._brought))
        self._barrier.wait()  # nobody brings the next before all have read these
        return found


def on_every_rank(size: int, run: Callable[[ThreadRanks], T], sp: int = 1) -> list[T]:
    """Returns what each of `size` ranks gets. An error of one ends the others too. `sp`: ranks that share tokens."""
    barrier, brought = Barrier(size), [torch.empty(0)] * size

    def guarded(rank: int) -> T:
        try:
            return run(ThreadRanks(Shard(rank, size, sp), barrier, brought))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))
