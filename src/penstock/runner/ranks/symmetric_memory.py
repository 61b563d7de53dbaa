"""Collectives of GPUs of one host, through torch's symmetric memory: each rank's kernels read the others' buffers.

Kernels of all ranks wait for each other on the device, in CUDA graphs too, so the host is never asked. Small sums are
read by every rank from all others (one shot); large ones are summed piece by piece, each by one rank (two shots).
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.model.shard import Shard

BUFFER_BYTES = 128 << 20  # of what a rank brings at a time; more goes in pieces
_ONE_SHOT_BYTES = 512 << 10  # up to here one shot is faster: two ranks always, four on NVLink
_ALIGNMENT = 16
_READ, _WRITTEN = 3, 4  # channels of signals
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class SymmetricMemoryRanks:
    def __init__(
        self, shard: Shard, device: torch.device, group: dist.ProcessGroup, *, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        """`group`: the ranks that split layers with this one. All of them call this at once."""
        self.shard = shard
        self._group = group.group_name
        self._buffer, self._handle = _shared(buffer_bytes, device, group)

    def sum(self, x: Tensor) -> Tensor:
        if x.dtype not in (torch.bfloat16, torch.float32):
            return self.sum(x.float()).to(x.dtype)
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

    def gather(self, x: Tensor) -> Tensor:
        rows = max(1, self._buffer.numel() // (x.shape[1] * x.itemsize))
        return torch.cat([self._gather(some) for some in torch.split(x, rows)])

    def _gather(self, x: Tensor) -> Tensor:
        self._buffer[: x.numel() * x.itemsize].view(x.dtype).copy_(x.reshape(-1))
        self._handle.barrier(channel=0)
        parts = [self._handle.get_buffer(rank, list(x.shape), x.dtype) for rank in range(self.shard.size)]
        found = torch.cat(parts, dim=1)
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


def _shared(num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    return buffer, symmetric.rendezvous(buffer, group.group_name)
