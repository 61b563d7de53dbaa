"""Names for the beginnings of prompts whose tokenizer is not known: by bytes, so approximate, but the same for equals.

Conversations that begin alike are sent where their beginning was sent before. What such a replica really holds it does
not say in these terms, so the index goes by what was routed there.
"""

from __future__ import annotations

from hashlib import blake2b

from penstock.gateway.proxy.request_view import RequestView

BLOCK_BYTES = 1024  # about a routing block of tokens
_MAX_BLOCKS = 256


def byte_names(asked: RequestView, tenant: str) -> tuple[int, ...]:
    """Returns the hashes of every whole block of what the client said, as it was written."""
    said = b"".join(map(bytes, (asked.system, asked.messages, asked.prompt, asked.instructions, asked.input)))
    digest = tenant.encode()
    names = []
    for start in range(0, min(len(said) // BLOCK_BYTES, _MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        digest = blake2b(digest + said[start : start + BLOCK_BYTES], digest_size=8, person=b"penstock.bytes").digest()
        names.append(int.from_bytes(digest, "little"))
    return tuple(names)
