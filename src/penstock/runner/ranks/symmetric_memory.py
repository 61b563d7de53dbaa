"""Collectives of GPUs of one host, through torch's symmetric memory: each rank's kernels read the others' buffers.

Kernels of all ranks wait for each other on the device, in CUDA graphs too, so the host is never asked. Small sums are
read by every rank from all others (one shot); large ones are summed piece by piece, each by one rank (two shots).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.model.shard import Shard
from penstock.runner.ranks.collective_times import SIZES, CollectiveTimes, measure

BUFFER_BYTES = 128 << 20  # of what a rank brings at a time; more goes in pieces
_ONE_SHOT_BYTES = 512 << 10  # up to here one shot is faster: two ranks always, four on NVLink
_ALIGNMENT = 16
_READ, _WRITTEN = 3, 4  # channels of signals
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class SymmetricMemoryRanks:
    is_estimated = True  # the time of its collectives: see `collective_times`
    stays_in_place = True  # the buffer, which other ranks have mapped: see `rehome`

    def __init__(
        self, shard: Shard, device: torch.device, group: dist.ProcessGroup, *, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        """`group`: the ranks that split layers with this one. All of them call this at once."""
        self.shard = shard
        self._group = group.group_name
        self._buffer, self._handle = _shared(buffer_bytes, device, group)
        self.communication_s = 0.0
        self._sum_times = self._gather_times = CollectiveTimes()
        sizes = [size for size in SIZES if size <= buffer_bytes]
        self._sum_times, self._gather_times = (measure(run, device, sizes) for run in (self.sum, self.gather))

    def sum(self, x: Tensor) -> Tensor:
        if x.dtype not in (torch.bfloat16, torch.float32):
            return self.sum(x.float()).to(x.dtype)
        self.communication_s += self._sum_times.of(x.nbytes)
        flat, out = x.reshape(-1), torch.empty_like(x, memory_format=torch.contiguous_format)
        room = self._buffer.numel() // x.itemsize
        for begin in range(0, flat.numel(), room):
            self._sum(flat[begin : begin + room], out.view(-1)[begin : begin + room])
        return out

    def _sum(self, x: Tensor, out: Tensor) -> None:
        count = x.numel()
        num_bytes = -(-count * x.itemsize // _ALIGNMENT) * _ALIGNMENT
        part = self._buffer[:num_bytes].view(x.dtype)
        part[:count].copy_(x)
        if self.shard.size == 2 or num_bytes <= _ONE_SHOT_BYTES:
            out.copy_(torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._group)[:count])
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self._group)
            out.copy_(part[:count])
            self._handle.barrier(channel=2)  # others may still read what is written next

    def gather(self, x: Tensor, among: int | None = None) -> Tensor:
        self.communication_s += self._gather_times.of(x.nbytes)
        count = among or self.shard.size
        first = self.shard.rank // count * count
        rows = max(1, self._buffer.numel() // (x.shape[1] * x.itemsize))
        return _joined([self._gather(some, range(first, first + count)) for some in torch.split(x, rows)], 0)

    def _gather(self, x: Tensor, ranks: range) -> Tensor:
        return self._read(x, lambda buffer: torch.cat([buffer(rank) for rank in ranks], dim=1))

    def exchange(self, x: Tensor) -> Tensor:
        rows = max(1, self._buffer.numel() // (x.shape[0] * x.shape[2] * x.itemsize))
        return _joined([self._exchange(some) for some in torch.split(x, rows, dim=1)], 1)

    def _exchange(self, x: Tensor) -> Tensor:
        ranks, place = self.shard.neighbours, self.shard.tokens.place
        return self._read(x, lambda buffer: torch.stack([buffer(rank)[place] for rank in ranks]))

    def _read(self, x: Tensor, combine: Callable[[Callable[[int], Tensor]], Tensor]) -> Tensor:
        """The result of `combine`, which is given other ranks' x by their numbers."""
        self._buffer[: x.numel() * x.itemsize].view(x.dtype).view(x.shape).copy_(x)
        self._handle.barrier(channel=0)
        found = combine(lambda rank: self._handle.get_buffer(rank, list(x.shape), x.dtype))
        self._handle.barrier(channel=1)  # nobody writes again before all have read
        return found

    def broadcast(self, x: Tensor) -> Tensor:
        """A sum with zeros, of floats: they hold every token id up to 2**24 exactly."""
        return self.sum(x.float() if self.shard.rank == 0 else torch.zeros_like(x, dtype=torch.float32)).to(x.dtype)

    def give_up(self, rank: int) -> None:
        """Kernels that wait on a device end with their process."""


class SymmetricMemoryLink:
    """One end of the way between two pipeline stages: the sender writes into the receiver's buffer, on the device.

    Both wait for each other there: the sender until the buffer was read, the receiver until it was written."""

    def __init__(self, memory: LinkMemory, other: int, *, hidden: int, dtype: torch.dtype) -> None:
        """`other`: the rank at the other end."""
        self._memory = memory
        self._other = other
        self._hidden = hidden
        self._dtype = dtype

    def send(self, x: Tensor) -> None:
        handle = self._memory.handle
        handle.wait_signal(self._other, _READ)
        handle.get_buffer(self._other, list(x.shape), self._dtype).copy_(x)
        handle.put_signal(self._other, _WRITTEN)

    def receive(self, num_rows: int) -> Tensor:
        handle = self._memory.handle
        handle.wait_signal(self._other, _WRITTEN)
        found: Tensor = handle.get_buffer(self._memory.rank, [num_rows, self._hidden], self._dtype).clone()
        handle.put_signal(self._other, _READ)
        return found

    def offer(self) -> None:
        """The receiver's buffer may be written: said once, before the first stream."""
        self._memory.handle.put_signal(self._other, _READ)


class LinkMemory:
    """Each rank's buffer for what the stage before sends it. All ranks of the model make theirs at once."""

    stays_in_place = True  # as above

    def __init__(self, rank: int, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.rank = rank
        self._buffer, self.handle = _shared(buffer_bytes, device, group)


def meet(store: Store, rank: int, size: int, tp: int) -> dist.ProcessGroup:
    """The ranks of this one's stage, once all ranks of the model have met."""
    if torch.cuda.device_count() < size:
        os.environ[_OVERLAPPING] = "1"  # several ranks on one device: for tests, see `device_of`
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    assert not dist.is_initialized(), "torch knows a group by its name: a process has one engine of several GPUs"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    stages = [dist.new_group(list(range(first, first + tp))) for first in range(0, size, tp)]  # all make all of them
    own = stages[rank // tp]
    assert isinstance(own, dist.ProcessGroup)
    return own


def _joined(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def _shared(num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    return buffer, symmetric.rendezvous(buffer, group.group_name)
