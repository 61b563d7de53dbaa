"""KV cache events that a replica sends to a gateway: the routing blocks it holds, then what changes.

Server-sent events, each a `BlockNews`. The first is a snapshot, and so is any later one that has `hashes`: what was
known before it counts for nothing. The others say what came, went and moved after the number `after`; without either
they are a sign of life. A reader that does not stand at `after` has lost something, and asks again for a snapshot.
A reader that does not know `host` takes what has moved there for stored, and is not wrong by much.

Hashes are `core.hashing`'s, eight bytes each in one run of base64: a cache of 600,000 tokens takes 25 kB.
"""

from __future__ import annotations

import struct
from collections.abc import Collection

import msgspec

PATH = "/v1/penstock/blocks"
HASH_BYTES = 8


class BlockNews(msgspec.Struct, frozen=True, omit_defaults=True):
    boot: str  # of the engine's process: another one, another cache
    seq: int  # the number of the last change that this tells of
    after: int = 0  # of the last change before those
    size: int = 0  # tokens in a routing block; 0: it does not know what its cache holds (yet)
    hashes: bytes | None = None  # everything it holds on the device
    stored: bytes = b""  # on the device since then
    removed: bytes = b""
    host: bytes = b""  # in host memory only: everything, beside `hashes`; else since then


_decoder = msgspec.json.Decoder(BlockNews)

encode = msgspec.json.Encoder().encode


def decode(data: bytes) -> BlockNews | None:
    """None: nothing that this version understands."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def pack(hashes: Collection[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack_from(f"<{len(packed) // HASH_BYTES}Q", packed)
