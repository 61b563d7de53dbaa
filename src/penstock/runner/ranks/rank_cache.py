"""KV caches of ranks on one machine, as the leader reaches them: it lends and takes blocks of all of them.

A follower has its cache in memory that a descriptor stands for: a file without a name, or a GPU's physical memory. The
descriptor goes over a socket to the leader, which knows a word that it has told the follower. There is nothing to reach
if ranks are on several machines.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from penstock.core.errors import EngineFailed
from penstock.link.connection import Disconnected
from penstock.link.proof import Refused
from penstock.runner.assembly import Assembly
from penstock.runner.kv_memory import RankCache, SharedCache, parts_of
from penstock.runner.mapped_memory import MappingDriver, RankPool
from penstock.runner.ranks.messages import CacheHandle, PoolHandle
from penstock.runner.virtual_memory import VirtualMemory
from penstock.transfer.descriptors import DescriptorServer, fetch_descriptors
from penstock.transfer.host_memory import Parts
from penstock.transfer.shared_memory import LentFile


def offer_cache(assembly: Assembly, word: bytes) -> CacheHandle | None:
    """Handle of a CPU follower's cache, lent for as long as its process lives. None: its cache is its own."""
    if not isinstance(assembly.kv_home, SharedCache):
        return None
    parts = parts_of(assembly.kv)
    file = assembly.kv_home.file.lend(parts)
    server = DescriptorServer(word, [os.dup(file.descriptor)])
    return CacheHandle(server.name, file.nonce, list(file.offsets), parts.sizes.tolist(), parts.num_blocks)


class LentPool:
    """Cache of a follower on a GPU, for the leader. Nobody is handed it while it is parked."""

    def __init__(self, home: VirtualMemory, pool: Tensor, word: bytes) -> None:
        """`pool`: [layers, 2, blocks, …], as Triton's kernels have it."""
        self._home, self._pool, self._word = home, pool, word
        self._server: DescriptorServer | None = None

    def offer(self) -> PoolHandle:
        assert self._server is None
        self._server = DescriptorServer(self._word, [self._home.export(self._pool)])
        layers, two, num_blocks, *_ = self._pool.shape
        part_bytes = self._pool[0, 0, 0].nbytes
        shape = (layers * two, num_blocks, part_bytes)
        return PoolHandle(self._server.name, self._home.size_of(self._pool), shape)

    def withdraw(self) -> None:
        """The descriptor is closed: it would keep the memory from being given back."""
        if self._server is not None:
            self._server.close()
            self._server = None


def lent_pool(assembly: Assembly, word: bytes) -> LentPool | None:
    """None: it is no cache of a GPU, or one that is laid out for other kernels."""
    if not isinstance(assembly.kv_home, VirtualMemory) or assembly.formats.kernels != "triton":
        return None
    from penstock.model.ops.triton import TritonKV  # takes Triton

    first = assembly.kv[0]
    assert isinstance(first, TritonKV)
    return LentPool(assembly.kv_home, first.pool, word)


def reach_cache(handle: CacheHandle, word: bytes) -> RankCache:
    """Cache of a follower, mapped in the leader, to read and to write. Raises EngineFailed."""
    descriptor = _fetch(handle.socket, word)
    mapped = mmap.mmap(descriptor, 0)
    whole = memoryview(mapped)
    places = zip(handle.offsets, handle.sizes, strict=True)
    wholes = [whole[offset : offset + size * handle.num_blocks] for offset, size in places]
    return RankCache(LentFile(descriptor, handle.nonce, handle.offsets, mapped), Parts(wholes, handle.sizes))


def reach_pool(handle: PoolHandle, word: bytes, device: torch.device) -> RankPool:
    """The same on a GPU. `device`: the leader's own, which reaches it. Raises EngineFailed."""
    from penstock.runner.cuda_driver import CudaDriver

    return pool_at(handle, word, CudaDriver(device))


def pool_at(handle: PoolHandle, word: bytes, driver: MappingDriver) -> RankPool:
    """Raises EngineFailed."""
    pool = RankPool(driver, handle.num_bytes, handle.shape)
    map_pool(pool, handle, word)
    return pool


def map_pool(pool: RankPool, handle: PoolHandle, word: bytes) -> None:
    """The memory that the rank has now. Raises EngineFailed."""
    try:
        pool.map(_fetch(handle.socket, word))
    except RuntimeError as error:
        raise EngineFailed(f"the KV cache of another rank cannot be mapped: {error}") from None


def _fetch(name: str, word: bytes) -> int:
    try:
        (descriptor,) = fetch_descriptors(name, word)
    except (OSError, Refused, Disconnected) as error:
        raise EngineFailed(f"the KV cache of another rank cannot be reached: {error}") from None
    return descriptor
