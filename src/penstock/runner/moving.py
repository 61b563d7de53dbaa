"""Blocks on their way: from one place of the device's cache to another, to host memory, and back.

A plan names the copies in the order in which they happen. One copy of many blocks reads them all before it writes any,
so a run of them goes together until one reads what another has written, or writes where another has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from time import perf_counter

import torch
from torch import Tensor

from penstock.model.ops import LayerKV, Ops

Pair = tuple[int, int]  # source, destination

_MOST_BLOCKS = 64  # in one copy between devices: it takes as much memory again, for a moment


class BlockMover:
    """The host's blocks are numbered after the device's."""

    def __init__(self, ops: Ops, kv: list[LayerKV], host_blocks: int = 0) -> None:
        self._ops = ops
        self._kv = kv
        self._first_host = kv[0].keys.shape[0]
        self._device = [_plain(cache) for layer in kv for cache in (layer.keys, layer.values)] if host_blocks else []
        is_pinned = ops.device.type == "cuda"
        self._host = [
            torch.empty((host_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=is_pinned)
            for cache in self._device
        ]

    def move(self, pairs: Sequence[Pair]) -> None:
        for run in runs(pairs, self._first_host):
            source, destination = run[0]
            if destination >= self._first_host:
                self._copy(self._device, self._host, [(a, b - self._first_host) for a, b in run])
            elif source >= self._first_host:
                self._copy(self._host, self._device, [(a - self._first_host, b) for a, b in run])
            else:
                self._ops.copy_blocks(self._kv, run)

    def measure(self) -> float:
        """Seconds to copy a block to the host and back, among others."""
        count = min(_MOST_BLOCKS, self._first_host, self._host[0].shape[0])
        saved = [(block, self._first_host + block) for block in range(count)]
        best_s = inf
        for _ in range(3):
            began_s = perf_counter()
            self.move([*saved, *((there, here) for here, there in saved)])
            if self._ops.device.type == "cuda":
                torch.cuda.synchronize(self._ops.device)
            best_s = min(best_s, perf_counter() - began_s)
        return best_s / count

    @staticmethod
    def _copy(sources: list[Tensor], destinations: list[Tensor], pairs: list[Pair]) -> None:
        for first in range(0, len(pairs), _MOST_BLOCKS):
            ids = torch.tensor(pairs[first : first + _MOST_BLOCKS], dtype=torch.int64)
            for source, destination in zip(sources, destinations, strict=True):
                chosen = source[ids[:, 0].to(source.device)].to(destination.device)
                destination[ids[:, 1].to(destination.device)] = chosen


def runs(pairs: Sequence[Pair], first_host: int) -> Iterator[list[Pair]]:
    """Of copies that may go together: all between the same two memories."""
    run: list[Pair] = []
    written, unchanged = set[int](), set[int]()  # blocks; those that are copied onto themselves
    kind = (False, False)
    for source, destination in pairs:
        own = source >= first_host, destination >= first_host
        is_change = source != destination
        if own != kind or source in written or destination in written or (is_change and destination in unchanged):
            if run:
                yield run
            run, written, unchanged = [], set(), set()
        kind = own
        run.append((source, destination))
        (written if is_change else unchanged).add(destination)
    if run:
        yield run


def _plain(cache: Tensor) -> Tensor:
    """Not every torch indexes every type of 8 bits."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
