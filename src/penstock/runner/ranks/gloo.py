"""Collectives of ranks on several nodes, through torch's process groups: gloo between CPUs, NCCL between GPUs.

Sums are gathered and added in the order of ranks, as in shared memory: every rank has the same bits, and they are those
of ranks on one host. Pieces of larger sums are added by one rank each. NCCL adds in an order of its own; each piece of
a sum by one rank, too, so that all have the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
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
        self._gathered_bytes = gathered_bytes
        own = PrefixStore(f"stage-{first_rank}", store)
        make = self._nccl if self._is_gpu else self._gloo
        self._group: Any = self._guarded(lambda: make(own, host, timedelta(seconds=timeout_s)))

    def _gloo(self, store: Store, host: str, timeout: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return dist.ProcessGroupGloo(store, self.shard.rank, self.shard.size, options)

    def _nccl(self, store: Store, host: str, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, self.shard.rank, self.shard.size, options)

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

    def gather(self, x: Tensor) -> Tensor:
        part = x.contiguous()
        parts = self._gathered(part.view(-1)).view(self.shard.size, *part.shape)
        return torch.cat([*parts], dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        out = x.contiguous().clone()
        self._guarded(lambda: self._group.broadcast(out, 0).wait())
        return out

    def give_up(self, rank: int) -> None:
        """Whoever waits gets an error when `timeout_s` is over, if its process has not been ended before."""

    def _gathered(self, part: Tensor) -> Tensor:
        """[ranks, numbers]"""
        out = part.new_empty(self.shard.size, part.numel())
        self._guarded(lambda: self._group._allgather_base(out.view(-1), part).wait())
        return out

    def _guarded(self, run: Callable[[], T]) -> T:
        try:
            return run()
        except RuntimeError as error:  # torch has no other for what goes wrong between processes
            what = re.sub(r"^\[.*?\] |\. This is typically .*", "", str(error).partition("\n")[0])
            if self.shard.size == 2:
                other = self._first_rank + 1 - self.shard.rank
                raise RankLost(other, f"a collective failed: {what}", self._where(other)) from None
            own = self._first_rank + self.shard.rank
            why = f"it lost touch with the other ranks of its stage: {what}"
            raise RankLost(own, why, self._where(own)) from None


def _added(parts: Tensor) -> Tensor:
    """[ranks, numbers]: their sum, rank by rank."""
    found = parts[0].clone()
    for part in parts[1:]:
        found += part
    return found
