"""Sums by one of two ways, chosen by their size: those of decodes by one, the large ones of prompts by the other.

It knows neither way. Ranks bring tensors of the same shape to a sum, so that all choose alike.
"""

from __future__ import annotations

from torch import Tensor

from penstock.model.ranks import Ranks
from penstock.model.shard import Shard

_MIB = 1 << 20

# Bytes of a sum beyond which NCCL's all-reduce is taken between the GPUs of a node, by number of ranks: where vLLM ends
# with kernels over symmetric memory on Hopper (SYMM_MEM_ALL_REDUCE_MAX_SIZES for 9.0, of vllm/distributed/
# device_communicators/all_reduce_utils.py). A chunk of 8,192 tokens of Llama 8B is 64 MiB, of 70B 128 MiB.
NCCL_BEYOND_BYTES = {2: 64 * _MIB, 4: 32 * _MIB, 8: 64 * _MIB}


def nccl_beyond_bytes(num_ranks: int) -> int:
    """The figure of the next smaller number of ranks that somebody published one for."""
    return NCCL_BEYOND_BYTES[max(size for size in NCCL_BEYOND_BYTES if size <= max(2, num_ranks))]


class SumsBySize:
    """Gathers, exchanges and broadcasts are the small way's."""

    def __init__(self, small: Ranks, large: Ranks, *, beyond_bytes: int) -> None:
        """`beyond_bytes`: of what a rank brings to a sum; more goes by `large`."""
        assert small.shard == large.shard
        self._small, self._large = small, large
        self._beyond_bytes = beyond_bytes

    @property
    def shard(self) -> Shard:
        return self._small.shard

    def sum(self, x: Tensor) -> Tensor:
        return (self._large if x.nbytes > self._beyond_bytes else self._small).sum(x)

    def gather(self, x: Tensor, among: int | None = None) -> Tensor:
        return self._small.gather(x, among)

    def exchange(self, x: Tensor) -> Tensor:
        return self._small.exchange(x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._small.broadcast(x)

    def give_up(self, rank: int) -> None:
        """Kernels that wait on a device end with their process."""
