"""Collectives of ranks on several nodes, through torch's process groups: gloo between CPUs, NCCL between GPUs.

Sums are gathered and added in the order of ranks, as in shared memory: every rank has the same bits, and they are those
of ranks on one host. Pieces of larger sums are added by one rank each. NCCL adds in an order of its own; each piece of
a sum by one rank, too, so that all have the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.core.ranks import RankLost
from penstock.model.shard import Shard

T = TypeVar("T")

_GATHERED_BYTES = 256 << 10  # up to here one round of messages is faster than two


class DistributedRanks:
    """One rank's side. All ranks of a stage make it at once."""

    def __init__(
        self,
        shard: Shard,
        device: torch.device,
        store: Store,
        *,
        host: str,
        timeout_s: float,
        first_rank: int = 0,
        where: Callable[[int], str] = lambda rank: "",
        gathered_bytes: int = _GATHERED_BYTES,
    ) -> None:
        """`store`: by which the ranks find each other; `host`: this node's address; `first_rank`: the number of this
        stage's first rank among all ranks of the model; `where`: a rank's node."""
        self.shard = shard
        self._first_rank = first_rank
        self._where = where
        self._is_gpu = device.type == "cuda"
        if not self._is_gpu:  # the host does not wait for NCCL
            self.communication_s = 0.0
        self._gathered_bytes = gathered_bytes
        own = PrefixStore(f"stage-{first_rank}", store)
        self._group: Any = self._guarded(
            lambda: make_group(device, own, shard.rank, shard.size, host=host, timeout_s=timeout_s)
        )
        self._near: Any = self._group  # those that share out tokens with this one
        if 1 < shard.sp < shard.size:
            near, place = PrefixStore(f"near-{shard.neighbours.start}", own), shard.tokens.place
            self._near = self._guarded(
                lambda: make_group(device, near, place, shard.sp, host=host, timeout_s=timeout_s)
            )

    def sum(self, x: Tensor) -> Tensor:
        if self._is_gpu:
            out = x.contiguous().clone()
            self._guarded(lambda: self._group.allreduce([out]).wait())
            return out
        part = x.float().contiguous()
        if self.shard.size == 2 or part.nbytes <= self._gathered_bytes:
            return _added(self._gathered(part.view(-1))).view(x.shape).to(x.dtype)
        return self._summed_in_pieces(part).view(x.shape).to(x.dtype)

    def _summed_in_pieces(self, part: Tensor) -> Tensor:
        """Each rank adds a piece of all parts, and all gather the pieces."""
        size, count = self.shard.size, part.numel()
        each = -(-count // size)
        padded = part.new_zeros(each * size)
        padded[:count] = part.view(-1)
        received = torch.empty_like(padded)
        self._guarded(lambda: self._group.alltoall_base(received, padded, [], []).wait())
        return self._gathered(_added(received.view(size, each))).view(-1)[:count]

    def gather(self, x: Tensor, among: int | None = None) -> Tensor:
        part, count = x.contiguous(), among or self.shard.size
        assert count in (self.shard.size, self.shard.sp), "no such group"
        group = self._group if count == self.shard.size else self._near
        parts = self._gathered(part.view(-1), group, count).view(count, *part.shape)
        return torch.cat([*parts], dim=1)

    def exchange(self, x: Tensor) -> Tensor:
        parts = x.contiguous()
        out = torch.empty_like(parts)
        ways = out.view(torch.uint8).view(-1), parts.view(torch.uint8).view(-1)
        self._guarded(lambda: self._near.alltoall_base(*ways, [], []).wait())
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        out = x.contiguous().clone()
        self._guarded(lambda: self._group.broadcast(out, 0).wait())
        return out

    def give_up(self, rank: int) -> None:
        """A rank that waits gets an error when `timeout_s` is over, if its process has not been ended before."""

    def _gathered(self, part: Tensor, group: Any = None, count: int | None = None) -> Tensor:
        """[ranks, numbers], of `count` ranks in `group`; None: of all."""
        out = part.new_empty(count or self.shard.size, part.numel())
        self._guarded(lambda: (group or self._group)._allgather_base(out.view(-1), part).wait())
        return out

    def _guarded(self, run: Callable[[], T]) -> T:
        began_s = perf_counter()
        try:
            found = run()
        except RuntimeError as error:  # torch has no other for what goes wrong between processes
            what = _words(error)
            if self.shard.size == 2:
                other = self._first_rank + 1 - self.shard.rank
                raise RankLost(other, f"a collective failed: {what}", self._where(other)) from None
            own = self._first_rank + self.shard.rank
            why = f"it lost touch with the other ranks of its stage: {what}"
            raise RankLost(own, why, self._where(own)) from None
        if not self._is_gpu:
            self.communication_s += perf_counter() - began_s
        return found


class DistributedLink:
    """One end of the way between two pipeline stages of GPUs on several nodes."""

    def __init__(
        self, group: Any, other: int, device: torch.device, *, hidden: int, dtype: torch.dtype, where: str = ""
    ) -> None:
        """`group`: all ranks of the model; `other`: the rank at the other end, `where`: its node."""
        self._group = group
        self._other = other
        self._device = device
        self._hidden = hidden
        self._dtype = dtype
        self._where = where

    def send(self, x: Tensor) -> None:
        self._wait(lambda: self._group.send([x.to(self._dtype).contiguous()], self._other, 0))

    def receive(self, num_rows: int) -> Tensor:
        out = torch.empty(num_rows, self._hidden, dtype=self._dtype, device=self._device)
        self._wait(lambda: self._group.recv([out], self._other, 0))
        return out

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise RankLost(self._other, f"the stream of a step is cut: {_words(error)}", self._where) from None


def make_group(
    device: torch.device, store: Store, rank: int, size: int, *, host: str, timeout_s: float
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    """Ranks that find each other by a store. All of them call this at once."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def _words(error: RuntimeError) -> str:
    """Torch's own words, without where in its source it says so and what else it advises."""
    return re.sub(r"^\[.*?\] |\. This is typically .*", "", str(error).partition("\n")[0])


def _added(parts: Tensor) -> Tensor:
    """[ranks, numbers]: their sum, rank by rank."""
    found = parts[0].clone()
    for part in parts[1:]:
        found += part
    return found
