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
