"""KV caches of ranks on one machine, as the leader reaches them: it lends and takes blocks of all of them.

A follower has its cache in a file without a name. The descriptor goes over a socket to the leader, which knows a word
that it has told the follower. Where ranks are on several machines, or on GPUs, there is nothing to reach.
"""

from __future__ import annotations

import mmap
import os

from penstock.core.errors import EngineFailed
from penstock.link.connection import Disconnected
from penstock.link.proof import Refused
from penstock.runner.assembly import Assembly
from penstock.runner.kv_memory import RankCache, SharedCache, parts_of
from penstock.runner.ranks.messages import CacheHandle
from penstock.transfer.descriptors import DescriptorServer, fetch_descriptors
from penstock.transfer.host_memory import Parts
from penstock.transfer.shared_memory import LentFile


def offer_cache(assembly: Assembly, word: bytes) -> CacheHandle | None:
    """In a follower: for as long as its process lives. None: its cache is its own."""
    if not isinstance(assembly.kv_home, SharedCache):
        return None
    parts = parts_of(assembly.kv)
    file = assembly.kv_home.file.lend(parts)
    server = DescriptorServer(word, [os.dup(file.descriptor)])
    return CacheHandle(server.name, file.nonce, list(file.offsets), parts.sizes.tolist(), parts.num_blocks)


def reach_cache(handle: CacheHandle, word: bytes) -> RankCache:
    """In the leader, to read and to write. Raises EngineFailed."""
    try:
        (descriptor,) = fetch_descriptors(handle.socket, word)
    except (OSError, Refused, Disconnected) as error:
        raise EngineFailed(f"the KV cache of another rank cannot be reached: {error}") from None
    mapped = mmap.mmap(descriptor, 0)
    whole = memoryview(mapped)
    places = zip(handle.offsets, handle.sizes, strict=True)
    wholes = [whole[offset : offset + size * handle.num_blocks] for offset, size in places]
    return RankCache(LentFile(descriptor, handle.nonce, handle.offsets, mapped), Parts(wholes, handle.sizes))
