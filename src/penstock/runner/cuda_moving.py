"""Blocks between a GPU's cache and host memory while the GPU computes: nothing here is waited for by the host.

A block is one piece in host memory and has a part in every layer of the cache. So it passes through a bay, a buffer on
the device. The step's own stream packs an outgoing block into a bay, which takes microseconds, and a second stream
brings it over the bus while the step runs. A third stream fetches an incoming one into a bay, while the step before
still runs, and the step's own stream waits for that and unpacks it. Events keep the order: of a bay's uses, and of what
is read and written on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.ops import LayerKV
from penstock.model.ops.triton import TritonKV
from penstock.model.ops.triton.attention.kv_copy import as_words, gather_blocks, scatter_blocks
from penstock.runner.moving import Pair, stretches
from penstock.runner.pinned import PinnedMemory

_BAYS = 8  # of each way: so many parts of a copy are on their way at once


@dataclass(frozen=True)
class Bay:
    blocks: Tensor  # [blocks, parts, words]
    is_free: torch.cuda.Event  # happens when what was put there last has been taken out


@dataclass
class Lane:
    """One way over the bus."""

    stream: torch.cuda.Stream
    bays: list[Bay]
    _turn: int = 0

    @classmethod
    def make(cls, num_blocks: int, like: Tensor) -> Lane:
        """Lane with room for `num_blocks` blocks in all."""
        parts, _, words = like.shape
        count = min(_BAYS, num_blocks)
        room = torch.empty(count, num_blocks // count, parts, words, dtype=like.dtype, device=like.device)
        stream = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
        return cls(stream, [Bay(blocks, _event()) for blocks in room])

    def next_bay(self) -> Bay:
        self._turn += 1
        return self.bays[self._turn % len(self.bays)]

    def parts(self, pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
        """Yields the pairs in parts, each as many as a bay holds."""
        size = self.bays[0].blocks.shape[0]
        return (pairs[first : first + size] for first in range(0, len(pairs), size))


class CudaCopies:
    """`staging_blocks`: how many blocks the device has room for beside the cache, in the bays of both lanes."""

    def __init__(self, kv: list[LayerKV], num_blocks: int, staging_blocks: int) -> None:
        first = kv[0]
        assert isinstance(first, TritonKV)
        self.num_blocks = num_blocks
        self._pool = as_words(first.pool)
        parts, _, words = self._pool.shape
        self._memory = PinnedMemory(num_blocks * parts * words * self._pool.itemsize)
        self._host = self._memory.bytes.view(self._pool.dtype).view(num_blocks, parts, words)
        self._bytes = self._memory.bytes.view(num_blocks, -1).numpy()
        self._out, self._in = (Lane.make(staging_blocks // 2, self._pool) for _ in range(2))
        self._leaving: set[int] = set()  # blocks of the host that may not be there yet, for all that the way in knows

    def save(self, pairs: Sequence[Pair]) -> None:
        main, lane = torch.cuda.current_stream(self._pool.device), self._out
        self._leaving.update(there for _, there in pairs)
        for part in lane.parts(pairs):
            bay = lane.next_bay()
            main.wait_event(bay.is_free)
            gather_blocks(self._pool, self._ids([here for here, _ in part]), bay.blocks)
            lane.stream.wait_stream(main)  # and so for what is being loaded from these blocks of the host
            with torch.cuda.stream(lane.stream):
                for first, there, count in stretches([there for _, there in part]):
                    self._host[there : there + count].copy_(bay.blocks[first : first + count], non_blocking=True)
                bay.is_free.record()

    def load(self, pairs: Sequence[Pair]) -> None:
        main, lane = torch.cuda.current_stream(self._pool.device), self._in
        if not self._leaving.isdisjoint(there for there, _ in pairs):
            lane.stream.wait_stream(self._out.stream)
            self._leaving.clear()
        for part in lane.parts(pairs):
            bay = lane.next_bay()
            lane.stream.wait_event(bay.is_free)
            with torch.cuda.stream(lane.stream):
                for first, there, count in stretches([there for there, _ in part]):
                    bay.blocks[first : first + count].copy_(self._host[there : there + count], non_blocking=True)
            main.wait_stream(lane.stream)
            scatter_blocks(bay.blocks, self._ids([here for _, here in part]), self._pool)
            bay.is_free.record()

    def wait(self) -> None:
        torch.cuda.synchronize(self._pool.device)

    def parts(self, block: int) -> list[memoryview]:
        return [memoryview(self._bytes[block])]

    def wait_saved(self) -> None:
        self._out.stream.synchronize()

    def _ids(self, block_ids: list[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int32).pin_memory().to(self._pool.device, non_blocking=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
