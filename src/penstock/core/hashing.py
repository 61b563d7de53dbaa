"""Content hashes of KV blocks: a block is named by its tokens and everything before them.

Every chain starts from the namespace, so equal tokens of two namespaces never have equal hashes. There are two chains
of one prompt. An engine finds its own blocks (16 to 64 tokens) by a `BlockHash`, where a collision would mix two
prompts. A replica that speaks of its cache to a gateway names coarse *routing blocks* by 64 bits: a collision there is
a wrong guess about where to send a request, and no more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import unpack

BlockHash = bytes

ROUTING_TOKENS = 256  # tokens in a routing block, unless a replica says otherwise


def root_hash(namespace: str, adapter: str = "") -> BlockHash:
    """`adapter` is the digest of a LoRA adapter's content: what it computed is no use to any other."""
    if not adapter:
        return blake2b(namespace.encode(), digest_size=16, person=b"penstock.root").digest()
    fields = f"{len(adapter)}:{adapter}{namespace}"
    return blake2b(fields.encode(), digest_size=16, person=b"penstock.lora").digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


def cache_namespace(tenant: str, salt: str) -> str:
    """A gateway's namespace and the client's own salt, such that no salt can spell another namespace."""
    return f"{len(tenant)}:{tenant}{salt}" if tenant or salt else ""


def routing_root(namespace: str, *, adapter: str = "", media: str = "") -> int:
    """Root of a chain of routing hashes, from all that, besides tokens, makes the same tokens another KV content.

    `adapter` names a LoRA adapter; `media` is a digest of the prompt's images, sound and the like.
    """
    fields = f"{len(namespace)}:{namespace}{len(adapter)}:{adapter}{media}"
    return int.from_bytes(blake2b(fields.encode(), digest_size=8, person=b"penstock.route").digest(), "little")


def chain_routing(parent: int, token_ids: Sequence[int], size: int = ROUTING_TOKENS) -> list[int]:
    """The hash of every full routing block of `token_ids`, which follow the block (or the root) named `parent`."""
    tokens = array("I")
    tokens.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))  # half the constructor's time
    data = memoryview(tokens).cast("B")
    width = size * tokens.itemsize
    digest = parent.to_bytes(8, "little")
    chain = []
    for end in range(width, len(data) + 1, width):
        state = blake2b(digest, digest_size=8)
        state.update(data[end - width : end])
        digest = state.digest()
        chain.append(digest)
    return list(unpack(f"<{len(chain)}Q", b"".join(chain)))


def routing_hashes(
    namespace: str, token_ids: Sequence[int], size: int = ROUTING_TOKENS, *, adapter: str = "", media: str = ""
) -> list[int]:
    """The names of a prompt's full routing blocks, first to last: 64-bit numbers. About 90 µs for 8k tokens."""
    return chain_routing(routing_root(namespace, adapter=adapter, media=media), token_ids, size)
