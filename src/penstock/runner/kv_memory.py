"""The KV cache of a CPU as bytes, block by block and of all ranks, for whoever sends blocks to another engine or takes
them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

import numpy as np
import torch
from torch import Tensor

from penstock.model.ops import LayerKV
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.library import load_library
from penstock.transfer.host_memory import ByteTools, HostMemory, Parts, PlainTools
from penstock.transfer.messages import Layout
from penstock.transfer.shared_memory import LentFile, MemoryFile


class NativeTools:
    """`ByteTools` by `kernels/kv_bytes.c`, which works while other threads do."""

    checksum_name = "lanes64"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def checksum(self, parts: Parts, block_ids: Sequence[int], identity: bytes) -> int:
        seed = int.from_bytes(blake2b(identity, digest_size=8).digest(), "little")
        ids = np.array(block_ids, np.int64)
        pointers = (each.ctypes.data for each in (parts.addresses, ids, parts.sizes))
        found: int = self._library.kv_hash(*pointers, len(parts.sizes), len(ids), seed)
        return found >> 2  # as a message carries it

    def copy(self, source: Parts, theirs: Sequence[int], target: Parts, ours: Sequence[int]) -> None:
        to_ids, from_ids = np.array(ours, np.int64), np.array(theirs, np.int64)
        assert len(to_ids) == len(from_ids)
        arrays = target.addresses, to_ids, source.addresses, from_ids, target.sizes
        self._library.kv_copy(*(each.ctypes.data for each in arrays), len(target.sizes), len(to_ids))


def byte_tools() -> ByteTools:
    try:
        return NativeTools(load_library())
    except KernelsUnavailable:
        return PlainTools()


@dataclass(frozen=True)
class RankCache:
    """The KV cache of a rank, in a file that other processes map."""

    file: LentFile
    parts: Parts


def parts_of(kv: Sequence[LayerKV]) -> Parts:
    """A block is one piece in each layer's keys, and one in its values."""
    caches = [cache for layer in kv for cache in layer.caches]
    wholes = [memoryview(cache.view(torch.uint8).view(-1).numpy().data) for cache in caches]
    return Parts(wholes, [cache[0].numel() * cache.element_size() for cache in caches])


def host_memory(own: Parts, layout: Layout, others: Sequence[RankCache] = ()) -> HostMemory:
    """The cache of all ranks: a block has pieces on each of them. `layout`: all but what the caches tell; `others`:
    those of the ranks after this one."""
    every = [own, *(other.parts for other in others)]
    wholes = [whole for parts in every for whole in parts.wholes]
    sizes = [size for parts in every for size in parts.sizes.tolist()]
    return HostMemory(Parts(wholes, sizes), layout, byte_tools())


class SharedCache:
    """A KV cache in memory that other processes can map."""

    def __init__(self) -> None:
        self.file = MemoryFile()

    def zeros(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, as by `torch.zeros`."""
        assert device.type == "cpu"
        return torch.frombuffer(self.file.allocate(prod(size) * dtype.itemsize), dtype=dtype).view(*size)
