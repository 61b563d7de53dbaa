"""Collectives of ranks that share a host, through memory that all of them have mapped: `kernels/ranks.c`.

The memory is a file without a name (memfd), made by one rank and handed to the others: when the last of them is gone,
by whatever death, so is the memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch
from torch import Tensor

from penstock.core.ranks import RankLost
from penstock.model.ops import library as c
from penstock.model.ops.library import load_library
from penstock.model.shard import Shard

SLOT_BYTES = 8 << 20  # of what a rank brings at a time, twice; pages that are never written take no memory
_NAME = "penstock-ranks"


class SharedMemoryRanks:
    """One rank's side. Raises KernelsUnavailable where there is no C compiler."""

    def __init__(
        self, shard: Shard, descriptor: int, *, timeout_s: float, slot_bytes: int = SLOT_BYTES, first_rank: int = 0
    ) -> None:
        """`descriptor`: the memory, from `create`; it is closed here. `timeout_s`: how long to wait for another rank.
        `first_rank`: the number of this group's first rank among all ranks of the model, for messages."""
        self.shard = shard
        self._first_rank = first_rank
        self._library = load_library()
        size = self._library.ranks_bytes(shard.size, slot_bytes)
        with os.fdopen(descriptor, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.struct = c.Ranks(base, slot_bytes, int(timeout_s * 1e9), shard.rank, shard.size)
        self._pool = self._library.pool_new(1)
        weakref.finalize(self, self._library.pool_free, self._pool)

    @staticmethod
    def create(size: int, slot_bytes: int = SLOT_BYTES) -> int:
        """Memory for so many ranks, as a descriptor that other processes may be given."""
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, load_library().ranks_bytes(size, slot_bytes))
        return descriptor

    def sum(self, x: Tensor) -> Tensor:
        part = x.float().contiguous()
        out = torch.empty_like(part)
        self.check(self._library.ranks_sum(self._pool, self.struct, part.data_ptr(), out.data_ptr(), part.numel()))
        return out.to(x.dtype)

    def gather(self, x: Tensor, among: int | None = None) -> Tensor:
        part, count = x.float().contiguous(), among or self.shard.size
        rows, columns = part.shape
        out = part.new_empty(rows, columns * count)
        sizes = (rows, columns, columns, count)
        self.check(self._library.ranks_gather(self.struct, part.data_ptr(), out.data_ptr(), *sizes))
        return out.to(x.dtype)

    def exchange(self, x: Tensor) -> Tensor:
        parts = x.contiguous().view(torch.float32)  # the bits of whatever they are
        count, rows, columns = parts.shape
        out = torch.empty_like(parts)
        self.check(self._library.ranks_exchange(self.struct, parts.data_ptr(), out.data_ptr(), rows, columns, count))
        return out.view(x.dtype)

    def broadcast(self, x: Tensor) -> Tensor:
        return self.sum(x if self.shard.rank == 0 else torch.zeros_like(x))

    @property
    def communication_s(self) -> float:
        """Seconds spent in collectives so far, waits for the other ranks included."""
        return float(self.struct.spent_ns) / 1e9

    def give_up(self, rank: int) -> None:
        """Tell all that a rank is gone, so that nobody waits for it. Any thread may."""
        self._library.ranks_give_up(self.struct, rank - self._first_rank)

    def check(self, lost: int) -> None:
        """`lost`: what a collective in C returned."""
        if lost:
            raise RankLost(self._first_rank + lost - 1, "it did not come to a collective")
