"""Content hashes of KV blocks: a block is named by its tokens and everything before them.

The chain starts from the namespace, so equal tokens of two namespaces never have equal hashes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes


def root_hash(namespace: str) -> BlockHash:
    return blake2b(namespace.encode(), digest_size=16, person=b"penstock.root").digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


def chain_hashes(namespace: str, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of all the full blocks of `token_ids`, in order."""
    parent = root_hash(namespace)
    hashes = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_hash(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes
