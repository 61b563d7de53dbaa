"""Messages between gateway processes and the limiter of their host: batches of small messages, one frame each.

A frame is four bytes of length and a msgpack array. All that gathers within one turn of an event loop shares a frame,
so that hundreds of requests share a round trip.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.tenancy.limits.quota import Quota, Refusal

MAX_FRAME_BYTES = 64 << 20


class Reserve(msgspec.Struct, array_like=True, tag=0):
    id: int  # chosen by the asking process; settling needs no answer first
    tenant: str
    quota: Quota
    tokens: int
    caller: int


class Settle(msgspec.Struct, array_like=True, tag=1):
    id: int
    used: int


class Release(msgspec.Struct, array_like=True, tag=2):
    id: int


class Progress(msgspec.Struct, array_like=True, tag=3):
    id: int
    used: int


class Restore(msgspec.Struct, array_like=True, tag=4):
    """A reservation told to a new host: the one that died gave it to me, and it is still open."""

    id: int
    tenant: str
    quota: Quota
    tokens: int
    used: int


class Beat(msgspec.Struct, array_like=True, tag=5):
    pass


class Granted(msgspec.Struct, array_like=True, tag=0):
    id: int


class Refused(msgspec.Struct, array_like=True, tag=1):
    id: int
    refusal: Refusal


Ask = Reserve | Settle | Release | Progress | Restore | Beat
Told = Granted | Refused

decode_asks = msgspec.msgpack.Decoder(list[Ask]).decode
decode_told = msgspec.msgpack.Decoder(list[Told]).decode
_encode = msgspec.msgpack.Encoder().encode


def frame(messages: list[Ask] | list[Told]) -> bytes:
    body = _encode(messages)
    return len(body).to_bytes(4, "big") + body


class Frames:
    """Bytes as they arrive, frames as they are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 4:
            size = int.from_bytes(buffer[at : at + 4], "big")
            if size > MAX_FRAME_BYTES:
                raise ValueError("not a limiter's frame")
            if len(buffer) - at - 4 < size:
                break
            yield bytes(buffer[at + 4 : at + 4 + size])
            at += 4 + size
        del buffer[:at]
