"""Messages between two engines of which one pulls KV blocks from the other.

The one that pulls calls. It asks for a chain of block hashes by a ticket of its own, and says how many of these blocks
it has room for (credit); the other sends blocks in the order of the chain, as soon as they are there, and at last that
no more come. Blocks are named by their hashes, which begin with the tenant's namespace and the adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec

from penstock.core.hashing import BlockHash
from penstock.core.request import Request

PROTOCOL = 3  # raised whenever a message changes
MAGIC = b"PENSTKV1"

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class Layout(msgspec.Struct, frozen=True):
    """Facts that two engines must have in common for a block of one to be a block of the other."""

    model: str  # a digest of its shape and weights
    kernels: str  # they decide how a block lies in memory
    number_format: str
    quant: str
    kv_dtype: str
    block_size: int
    parallelism: str  # of its ranks: each keeps a part of every block
    scales: tuple[float, ...] = ()  # that 8-bit floats were divided by
    block_bytes: int = 0
    num_parts: int = 0  # pieces of memory that a block is made of
    checksum: str = ""  # by which bytes that were sent are verified

    @property
    def digest(self) -> str:
        return blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()


# -- from who pulls


class Hello(msgspec.Struct, frozen=True, tag=True):
    epoch: str  # of the engine's process
    layout: Layout
    movers: list[str]  # that it can pull by, the best first
    machine: str = ""  # memory is shared among processes of one


class Use(msgspec.Struct, frozen=True, tag=True):
    """The mover that is used from now on: the first of those offered that works here."""

    mover: str


class Ask(msgspec.Struct, frozen=True, tag=True):
    ticket: Count
    hashes: list[BlockHash]
    credit: Count = 0  # blocks that there is room for
    prefill: Request | None = None  # to be computed where blocks are missing


class Credit(msgspec.Struct, frozen=True, tag=True):
    ticket: Count
    blocks: Count  # in all


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Nobody wants the rest."""

    ticket: Count


class Keep(msgspec.Struct, frozen=True, tag=True):
    """These are still wanted: the lease of their blocks goes on."""

    tickets: list[int]


class Read(msgspec.Struct, frozen=True, tag=True):
    """Blocks whose place was told are copied, or not wanted: their memory is not looked at any more."""

    ticket: Count
    first: Count
    count: Count


FromPuller = Hello | Use | Ask | Credit | Drop | Keep | Read
from_puller_decoder: msgspec.msgpack.Decoder[FromPuller] = msgspec.msgpack.Decoder(FromPuller)

# -- from who has the blocks


class Offer(msgspec.Struct, frozen=True):
    mover: str
    handle: bytes = b""  # how the mover reaches this engine's memory
    checksum: Count = 0  # of the handle


class Welcome(msgspec.Struct, frozen=True, tag=True):
    epoch: str
    offers: list[Offer]  # in the order in which the puller named them


class Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Blocks(msgspec.Struct, frozen=True, tag=True):
    """Their bytes follow the message, or lie where it says until `Read` comes."""

    epoch: str
    ticket: Count
    first: Count  # in the chain that was asked for
    count: Count
    checksum: Count = 0  # of the bytes that follow, if they do, and of what they are: see `identity`
    places: list[Count] = []  # blocks of the lender's memory; none: bytes follow

    def identity(self, hashes: Sequence[BlockHash]) -> bytes:
        """The identity of the bytes: blocks of these hashes, for this place of this ticket of this process."""
        own = hashes[self.first : self.first + self.count]
        return msgspec.msgpack.encode((self.epoch, self.ticket, self.first, self.count, own, self.places))


class Held(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Read`: these blocks were what they were said to be until then."""

    ticket: Count
    first: Count
    count: Count


class Working(msgspec.Struct, frozen=True, tag=True):
    """The engine lives and has not forgotten these."""

    tickets: list[int]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """No more blocks come."""

    ticket: Count
    reason: str = ""  # empty: all were sent
    computed_tokens: Count = 0  # for this ticket
    device_s: Seconds = 0.0
    kv_block_s: Seconds = 0.0


FromLender = Welcome | Refusal | Blocks | Held | Working | Ended
from_lender_decoder: msgspec.msgpack.Decoder[FromLender] = msgspec.msgpack.Decoder(FromLender)
