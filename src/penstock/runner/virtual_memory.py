"""Device memory that keeps its addresses while it is given back, so that captured graphs stay valid.

A segment is a range of addresses that is never given up, with physical memory behind it while the engine is awake.
Parking copies what must outlive it to pinned host memory, and releases the physical memory; waking puts new memory
behind the same addresses, and copies back. Tensors in a segment are used as any others, but not while it is parked.

Torch's allocator is not asked: its pools keep what was freed inside them, and weights leave much behind as they are
packed. So weights are loaded as ever, and then moved here (`rehome`); the KV cache is made here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.errors import PenstockError
from penstock.core.parking import MemoryChange


class MemoryDriver(Protocol):
    """Driver that hands out addresses and physical memory: see `cuda_driver`."""

    granularity: int

    def reserve(self, num_bytes: int) -> int: ...

    def create(self, num_bytes: int) -> int:
        """Raises `EngineUnavailable` where there is none."""

    def map(self, address: int, num_bytes: int, handle: int) -> None: ...

    def unmap(self, address: int, num_bytes: int) -> None: ...

    def release(self, handle: int) -> None: ...

    def export(self, handle: int) -> int: ...

    def tensor(self, address: int, num_bytes: int) -> Tensor: ...

    def free_bytes(self) -> int: ...

    def wait(self) -> None:
        """Waits until the device has done all that it was given."""


class Keep(enum.Enum):
    """Fate of a segment's content while it is parked."""

    ONCE = "once"  # weights: the copy of the first time stays, until they are said to have changed
    ALWAYS = "always"  # slots of adapters: it is copied each time
    NEVER = "never"  # a KV cache: it is zero afterwards


@dataclass(eq=False)
class Segment:
    address: int
    bytes: Tensor  # all of it
    keep: Keep
    handle: int  # of the physical memory; without meaning while it is parked
    host: Tensor | None = None  # its copy

    @property
    def num_bytes(self) -> int:
        return self.bytes.nbytes


class VirtualMemory:
    """The memory of one engine, which can be parked. Belongs to the thread that runs its steps."""

    def __init__(self, driver: MemoryDriver, pin: Callable[[int], Tensor]) -> None:
        """`pin`: host memory of so many bytes that the device copies from and to by itself; raises if there is none."""
        self._driver = driver
        self._pin = pin
        self._segments: list[Segment] = []
        self._is_parked = False
        self._has_changed = False  # what is kept once, since it was copied

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self._segments)

    def holds(self, address: int) -> bool:
        return any(one.address <= address < one.address + one.num_bytes for one in self._segments)

    @torch.inference_mode(False)
    def allocate(self, num_bytes: int, keep: Keep) -> Tensor:
        """A segment of its own: so many bytes of unknown content."""
        assert not self._is_parked
        driver = self._driver
        whole = max(1, -(-num_bytes // driver.granularity)) * driver.granularity
        handle = driver.create(whole)
        address = driver.reserve(whole)
        driver.map(address, whole, handle)
        segment = Segment(address, driver.tensor(address, whole), keep, handle)
        self._segments.append(segment)
        return segment.bytes[:num_bytes]

    def zeros(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros for a KV cache; arguments as of `torch.zeros`."""
        found = self.allocate(prod(size) * dtype.itemsize, Keep.NEVER).zero_().view(dtype).view(*size)
        assert found.device.type == device.type
        return found

    def export(self, tensor: Tensor) -> int:
        """A file descriptor of the physical memory behind a tensor, until the next park; whoever asks closes it."""
        return self._driver.export(self._segment(tensor).handle)

    def size_of(self, tensor: Tensor) -> int:
        """Bytes of the physical memory behind a tensor."""
        return self._segment(tensor).num_bytes

    def _segment(self, tensor: Tensor) -> Segment:
        own = tensor.untyped_storage().data_ptr()
        return next(one for one in self._segments if one.address == own)

    def change(self) -> None:
        """Memory that is kept once has changed: the next park copies it anew."""
        self._has_changed = True

    def park(self) -> MemoryChange:
        assert not self._is_parked
        watch = _Stopwatch()
        self._driver.wait()
        kept = [one for one in self._segments if one.keep is not Keep.NEVER]
        if new := [one for one in kept if one.host is None]:
            self._pin_copies(new)
            watch.lap("pin")
        for one in kept:
            if one.keep is Keep.ALWAYS or one in new or self._has_changed:
                assert one.host is not None
                one.host.copy_(one.bytes, non_blocking=True)
        self._has_changed = False
        self._driver.wait()
        watch.lap("copy")
        before = self._driver.free_bytes()
        self._unmap(self._segments)
        self._is_parked = True
        watch.lap("release")
        return MemoryChange(watch.seconds, self._driver.free_bytes() - before)

    def wake(self) -> MemoryChange:
        """The cache gets its memory while the weights are on their way over the bus."""
        assert self._is_parked
        watch, before, mapped = _Stopwatch(), self._driver.free_bytes(), list[Segment]()
        try:
            for one in sorted(self._segments, key=lambda one: one.keep is Keep.NEVER):
                one.handle = self._driver.create(one.num_bytes)
                self._driver.map(one.address, one.num_bytes, one.handle)
                mapped.append(one)
                if one.host is not None:
                    one.bytes.copy_(one.host, non_blocking=True)
                else:
                    one.bytes.zero_()
        except PenstockError:
            self._driver.wait()
            self._unmap(mapped)
            raise
        self._is_parked = False
        watch.lap("map")
        self._driver.wait()
        watch.lap("copy")
        return MemoryChange(watch.seconds, before - self._driver.free_bytes())

    def _pin_copies(self, segments: Sequence[Segment]) -> None:
        host = self._pin(sum(one.num_bytes for one in segments))
        begin = 0
        for one in segments:
            one.host = host[begin : begin + one.num_bytes]
            begin += one.num_bytes

    def _unmap(self, segments: Sequence[Segment]) -> None:
        for one in segments:
            self._driver.unmap(one.address, one.num_bytes)
            self._driver.release(one.handle)


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = perf_counter()

    def lap(self, phase: str) -> None:
        now_s = perf_counter()
        self.seconds[phase], self._since_s = now_s - self._since_s, now_s
