"""Blocks on their way: from one place of the device's cache to another, to host memory, and back.

A plan names the copies in the order in which they happen. One copy of many blocks reads them all before it writes any,
so a run of them goes together until one reads what another has written, or writes where another has.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from penstock.model.ops import LayerKV, Ops

Pair = tuple[int, int]  # source, destination

_MIN_TRIES, _MAX_TRIES = 3, 30  # to measure a copy
_AGREE = 1.2  # two measurements that differ by less than this factor were not disturbed
_MAX_BLOCKS = 64  # in one copy between devices: it takes as much memory again, for a moment


class HostCopies(Protocol):
    """Blocks in host memory. Both memories' are counted from 0 here, and no two pairs of a call meet.

    Calls happen in their order, and before whatever the device is given to do after them; they need not be done when
    they return.
    """

    num_blocks: int

    def save(self, pairs: Sequence[Pair]) -> None:
        """Copies blocks of the device to the host's."""

    def load(self, pairs: Sequence[Pair]) -> None:
        """Copies blocks of the host to the device's."""

    def wait(self) -> None:
        """Waits until all copies are done."""

    def parts(self, block: int) -> list[memoryview]:
        """The bytes of one of the host's blocks, to be read and written."""

    def wait_saved(self) -> None:
        """Waits until all saves are done. Any thread may call it."""


class BlockMover:
    """The host's blocks are numbered after the device's."""

    def __init__(self, ops: Ops, kv: list[LayerKV], host: HostCopies | None = None) -> None:
        self._ops = ops
        self._kv = kv
        self._first_host = kv[0].keys.shape[0]
        self._host = host

    def move(self, pairs: Sequence[Pair]) -> None:
        for run in runs(pairs, self._first_host):
            source, destination = run[0]
            if self._host is None or max(source, destination) < self._first_host:
                self._ops.copy_blocks(self._kv, run)
            elif destination >= self._first_host:
                self._host.save([(here, there - self._first_host) for here, there in run])
            else:
                self._host.load([(there - self._first_host, here) for there, here in run])

    def measure(self) -> float:
        """Seconds to copy a block to the host and back, among others, while nothing hides it."""
        assert self._host is not None
        count = min(_MAX_BLOCKS, self._first_host, self._host.num_blocks)
        pairs = [(block, block) for block in range(count)]
        return (
            sum(undisturbed(partial(self._seconds, copy, pairs)) for copy in (self._host.save, self._host.load)) / count
        )

    def _seconds(self, copy: Callable[[list[Pair]], None], pairs: list[Pair]) -> float:
        assert self._host is not None
        self._host.wait()
        began_s = perf_counter()
        copy(pairs)
        self._host.wait()
        return perf_counter() - began_s


def undisturbed(measure: Callable[[], float]) -> float:
    """The least of some measurements: of as many as it takes until two agree. Most of them on a busy machine are of how
    long a copy waited for its turn, and a host that seems slow is used for nothing until the engine's end."""
    found = sorted(measure() for _ in range(_MIN_TRIES))
    while found[1] > _AGREE * found[0] and len(found) < _MAX_TRIES:
        insort(found, measure())
    return found[0]


class PlainCopies:
    """Copies by torch alone, whatever the device: layer after layer, and done when it returns."""

    def __init__(self, ops: Ops, kv: list[LayerKV], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._device = [_plain(cache) for layer in kv for cache in layer.caches]
        is_pinned = ops.device.type == "cuda"
        self._host = [
            torch.empty((num_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=is_pinned)
            for cache in self._device
        ]
        self._bytes = [memory.view(num_blocks, -1).view(torch.uint8).numpy() for memory in self._host]

    def save(self, pairs: Sequence[Pair]) -> None:
        self._copy(self._device, self._host, pairs)

    def load(self, pairs: Sequence[Pair]) -> None:
        self._copy(self._host, self._device, pairs)

    def wait(self) -> None:
        if self._device[0].is_cuda:
            torch.cuda.synchronize(self._device[0].device)

    def parts(self, block: int) -> list[memoryview]:
        return [memoryview(rows[block]) for rows in self._bytes]

    def wait_saved(self) -> None:
        """They are done when `save` returns."""

    @staticmethod
    def _copy(sources: list[Tensor], destinations: list[Tensor], pairs: Sequence[Pair]) -> None:
        for first in range(0, len(pairs), _MAX_BLOCKS):
            ids = torch.tensor(pairs[first : first + _MAX_BLOCKS], dtype=torch.int64)
            for source, destination in zip(sources, destinations, strict=True):
                chosen = source[ids[:, 0].to(source.device)].to(destination.device)
                destination[ids[:, 1].to(destination.device)] = chosen


def runs(pairs: Sequence[Pair], first_host: int) -> Iterator[list[Pair]]:
    """Yields runs of copies that may go together: all between the same two memories."""
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


def stretches(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields stretches of consecutive numbers, which lie in one piece: (place of the first, the first, how many)."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield begin, numbers[begin], end - begin
            begin = end


def _plain(cache: Tensor) -> Tensor:
    """The cache as bytes where its type has 8 bits: not every torch indexes every such type."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
